"""The command `qspec doctor`: its options, and the run of the checks."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from functools import partial

from rich.console import Console

from sglang_qspec import values
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools import declare
from sglang_qspec.tools.doctor import report
from sglang_qspec.tools.doctor.case import DEFAULT_PORT, Case
from sglang_qspec.tools.doctor.checks import examine_all

DESCRIPTION = """Check this machine, the installed software and a pair of models before a server
starts, and print the command that starts it. Settings come from the environment variables
SGLANG_QSPEC_*, as for a server. The exit status is 0 if a server can start, also with warnings, and
1 if a check failed. docs/doctor.md describes the checks and the output of --json."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    add("--model", "the target: a folder, or a name on a hub", metavar="PATH")
    add("--draft-model", "the draft model: a folder, or a name on a hub", metavar="PATH")
    device = "device of the target: cpu, cuda or cuda:N (default: SGLang's choice)"
    add("--device", device, values.device, default="")
    add("--port", "port of the server", values.whole(1, 65535), "N", default=DEFAULT_PORT)
    measure = "also measure both models for about a minute, and say what to expect"
    declare.switch(parser, "--measure", measure)
    declare.switch(parser, "--json", "print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the checks and print their findings; return 0 if a server can start, otherwise 1.

    Raises ConfigError if options exclude each other.
    """
    console = Console(file=sys.stdout, highlight=False)  # `_quiet` redirects sys.stdout
    case = Case(options.model, options.draft_model, options.device, options.port, options.measure)
    if case.measure and (case.model is None or case.draft_model is None):
        raise ConfigError("--measure needs --model and --draft-model")
    findings = []
    with _quiet():
        for finding in examine_all(case):
            findings.append(finding)
            if not options.json:
                report.show(finding, console)
    if options.json:
        console.file.write(json.dumps(report.as_json(findings, case), indent=1) + "\n")
    else:
        report.show_end(findings, case, console)
    return 0 if report.is_usable(findings) else 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what SGLang and libraries print out of the report: errors go to standard error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
