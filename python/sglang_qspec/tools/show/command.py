"""The command `qspec show`: its options, and the loop that serves the page."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_qspec.tools.complete.client import Client
from sglang_qspec.values import option, whole

if TYPE_CHECKING:
    from sglang_qspec.tools.show.server import ShowServer

DESCRIPTION = """Serve a page that shows where each token of an answer comes from. The page streams
answers of a running QSPEC server. For each target pass it shows the n-gram that matched, the draft
tree with its chances, what was accepted, and the time. Saved answers open without a network."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:30000",
        help="address of the server (default: %(default)s)",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address that serves the page (default: %(default)s, which only this machine "
        "reaches). Whoever reaches the page can ask the server",
    )
    add(
        "--port",
        type=option(whole(0, 65535)),
        default=0,
        metavar="N",
        help="port of the page (default: 0, a free one)",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts to pick from: a prompt in each line, or a .jsonl file with a `prompt` in "
        "each line or in Spec-Bench's format",
    )
    add("--open", action="store_true", help="open the page in this desktop's browser")


def run(options: argparse.Namespace, say: Callable[[str], object]) -> None:
    """Serve the page until Ctrl-C; `say` prints a line.

    Raises ClientError if a server or an address cannot be used, and ConfigError for the prompts.
    """
    with start(options) as server:
        say(f"page: {server.url}   server: {options.url}   Ctrl-C ends")
        if options.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            return


def start(options: argparse.Namespace) -> ShowServer:
    """The web server, which accepts connections and does not answer them yet."""
    from sglang_qspec.tools.show import prompts
    from sglang_qspec.tools.show.server import ShowServer

    offered = prompts.load(options.prompts) if options.prompts else []
    return ShowServer(options.host, options.port, Client(options.url), offered)
