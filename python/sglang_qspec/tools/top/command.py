"""The command `qspec top`: its options, and the loop that shows frames."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial

from rich.console import Console, RenderableType
from rich.live import Live

from sglang_qspec import values
from sglang_qspec.errors import ClientError
from sglang_qspec.tools import declare
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.complete.peers import reading
from sglang_qspec.tools.top import view
from sglang_qspec.tools.top.interval import Interval, Snapshot

TIMEOUT_S = 10.0
"""Maximum wait for the server's answer, in seconds."""
DESCRIPTION = """Show what a running QSPEC server does: requests, pipeline, accept length by draft
source, drafted and wasted tokens, and the load of the sidecar. The view refreshes until Ctrl-C.
Rates are those of the time between two frames. Requests are those that can get drafts. The figures
are explained in docs/observability.md."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    declare.server(parser)
    seconds = values.number(0.1, 3600)
    add("--interval", "seconds between two frames, 0.1 to 3600", seconds, "S", default=2.0)
    rank = values.whole(0, 10**6)
    add("--dp-rank", "scheduler of a server with --dp-size, from 0", rank, "N", default=0)
    declare.switch(parser, "--once", "print one frame after one interval, and end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Show frames until Ctrl-C, or one frame with `--once`. Raises ClientError.

    If the output is not a terminal, the frames follow one another.
    """
    console = Console(markup=False, emoji=False)
    client = Client(options.url, TIMEOUT_S)
    shown = frames(client, options.interval, options.dp_rank)
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


def frames(client: Client, seconds: float, dp_rank: int) -> Iterator[RenderableType]:
    """Draw a frame of a scheduler every `seconds`; the first one after `seconds`.

    Raises ClientError.
    """
    before, schedulers = _snapshot(client, dp_rank)
    title = f"qspec top   {client.url}"
    if schedulers > 1:
        title += f"   scheduler {dp_rank} of 0 to {schedulers - 1}"
    while True:
        time.sleep(seconds)
        now, _ = _snapshot(client, dp_rank)
        with reading(client.url):
            frame = view.frame(Interval(before, now), title)
        yield frame
        before = now


def _snapshot(client: Client, dp_rank: int) -> tuple[Snapshot, int]:
    """The state of a scheduler now, and the number of schedulers. Raises ClientError."""
    _, states = client.info()
    if dp_rank >= len(states):
        raise ClientError(
            f"--dp-rank is {dp_rank}, but the last scheduler of the server is {len(states) - 1}"
        )
    return Snapshot(time.monotonic(), states[dp_rank]), len(states)
