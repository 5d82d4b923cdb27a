"""The command `qspec measure`: its options, and what it prints."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from sglang_qspec import values
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools import declare
from sglang_qspec.tools.complete.peers import reading

MOST_REQUESTS = 4096

DESCRIPTION = """Measure the tables of qspec plan on a running server with a sidecar: the time of
target passes by requests and width, of prompts, and of draft steps, and the agreement of the models
on given prompts. The server should serve nothing else meanwhile. Its runtime settings change during
the measurement and are restored. docs/plan.md describes the file."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    declare.server(parser)
    add("--prompts", "file of prompts, as for models compare", Path, "FILE")
    add("--output", "file of the tables to write", Path, "FILE", required=True)
    add(
        "--requests",
        "numbers of requests to measure, at most --max-running-requests (default: 1 2 4 8)",
        values.whole(1, MOST_REQUESTS),
        "N",
        default=[1, 2, 4, 8],
        nargs="+",
    )
    add("--tokens", "maximum length of an answer", values.positive, "N", default=64)
    add("--target-gpus", "GPUs of the target", values.positive, "N", default=1)
    add("--sidecar-gpus", "GPUs of the sidecar", values.positive, "N", default=1)
    add("--draft", "name of the draft model in the file", metavar="NAME", default="unnamed")
    machine = "name of the machine in the file (default: its host name)"
    add("--machine", machine, metavar="NAME", default="")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Measure, write the file, and return the text to print.

    Raises ClientError if the server cannot be measured, and ConfigError for a file that cannot be
    used.
    """
    from sglang_qspec.tools.measure.server_tables import Measurement
    from sglang_qspec.tools.measure.tables import save
    from sglang_qspec.tools.models.prompts import PROMPTS, texts_of

    if not options.output.parent.is_dir():  # known before the minutes of the measurement
        raise ConfigError(f"--output is {options.output}, but its folder does not exist")
    texts = texts_of(options.prompts, PROMPTS)
    # SIGTERM would end Python before the settings of the server are restored.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with reading(options.url):
            tables = Measurement(options.url, texts, options.tokens).tables(
                sorted(set(options.requests)),
                machine=options.machine,
                draft=options.draft,
                gpus=(options.target_gpus, options.sidecar_gpus),
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    save(tables, options.output)
    return f"Wrote {len(tables.verify)} pass times and the agreement to {options.output}."


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)
