"""The command `qspec top`: its options, and the loop that shows frames."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sglang_qspec.complete.client import Client
from sglang_qspec.top.interval import Interval, Snapshot
from sglang_qspec.values import number, option

if TYPE_CHECKING:
    from rich.console import RenderableType

TIMEOUT_S = 10.0
"""Maximum wait for the server's answer, in seconds."""
DESCRIPTION = """Show what a running QSPEC server does: requests, pipeline, accept length by draft
source, drafted and wasted tokens, and the load of the sidecar. The view refreshes until Ctrl-C.
Rates are those of the time between two frames. Requests are those that can get drafts. The figures
are explained in docs/observability.md."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:30000",
        help="address of the server (default: %(default)s)",
    )
    add(
        "--interval",
        type=option(number(0.1, 3600)),
        default=2.0,
        metavar="S",
        help="seconds between two frames, 0.1 to 3600 (default: 2)",
    )
    add("--once", action="store_true", help="print one frame after one interval, and end")


def run(options: argparse.Namespace) -> None:
    """Show frames until Ctrl-C, or one frame with `--once`. Raises ClientError.

    If the output is not a terminal, the frames follow one another.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    shown = frames(Client(options.url, TIMEOUT_S), options.interval)
    try:
        if options.once:
            console.print(next(shown))
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for frame in shown:
                    live.update(frame, refresh=True)
        else:
            for frame in shown:
                console.print(frame)
    except KeyboardInterrupt:
        return


def frames(
    client: Client, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[RenderableType]:
    """Draw a frame every `seconds`; the first one after `seconds`. Raises ClientError."""
    from sglang_qspec.top import view

    title = f"qspec top   {client.url}"
    before = _snapshot(client)
    while True:
        sleep(seconds)
        now = _snapshot(client)
        yield view.frame(Interval(before, now), title)
        before = now


def _snapshot(client: Client) -> Snapshot:
    state = client.state()
    return Snapshot(time.monotonic(), state)
