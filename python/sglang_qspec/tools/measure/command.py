"""The command `qspec measure`: its options, and what it prints."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from sglang_qspec import values
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.complete.peers import reading
from sglang_qspec.values import option

MOST_REQUESTS = 4096

DESCRIPTION = """Measure the tables of qspec plan on a running server with a sidecar: the time of
target passes by requests and width, of prompts, and of draft steps, and the agreement of the models
on given prompts. The server should serve nothing else meanwhile. Its runtime settings change during
the measurement and are restored. docs/plan.md describes the file."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    add("--prompts", type=Path, metavar="FILE", help="file of prompts, as for models compare")
    add("--output", type=Path, required=True, metavar="FILE", help="file of the tables to write")
    add(
        "--requests",
        type=option(values.whole(1, MOST_REQUESTS)),
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="numbers of requests to measure, at most --max-running-requests (default: 1 2 4 8)",
    )
    add(
        "--tokens",
        type=option(values.positive),
        default=64,
        metavar="N",
        help="maximum length of an answer (default: %(default)s)",
    )
    add("--target-gpus", type=option(values.positive), default=1, help="(default: %(default)s)")
    add("--sidecar-gpus", type=option(values.positive), default=1, help="(default: %(default)s)")
    add("--draft", default="unnamed", help="name of the draft model in the file")
    add("--machine", default="", help="name of the machine in the file (default: its host name)")
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
