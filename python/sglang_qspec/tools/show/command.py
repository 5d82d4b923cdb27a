"""The command `qspec show`: its options, and the loop that serves the page."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sglang_qspec.tools import declare
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.guesses import earlier
from sglang_qspec.tools.guesses.earlier import EarlierAnswers
from sglang_qspec.tools.show import prompts
from sglang_qspec.tools.show.server import ShowServer
from sglang_qspec.values import whole

DESCRIPTION = """Serve a page that shows where each token of an answer comes from. The page streams
answers of a running QSPEC server. For each target pass it shows the n-gram that matched, the draft
tree with its chances, what was accepted, and the time. Saved answers open without a network."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    declare.server(parser)
    add(
        "--host",
        "address that serves the page (default: %(default)s, which only this machine reaches). "
        "Whoever reaches the page can ask the server",
        default="127.0.0.1",
    )
    add("--port", "port of the page (default: 0, a free one)", whole(0, 65535), "N", default=0)
    add(
        "--prompts",
        "prompts to pick from: a prompt in each line, or a .jsonl file with a `prompt` in each "
        "line or in Spec-Bench's format",
        Path,
        "FILE",
    )
    earlier.add_option(parser)
    declare.switch(parser, "--open", "open the page in this desktop's browser")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, say: Callable[..., object] = print) -> None:
    """Serve the page until Ctrl-C; `say` prints its address.

    Raises ClientError if a server or an address cannot be used, and ConfigError for the prompts.
    """
    offered = prompts.load(options.prompts) if options.prompts else []
    with (
        EarlierAnswers.open(options.guesses_from) as answers,
        ShowServer(options.host, options.port, Client(options.url), offered, answers) as server,
    ):
        say(f"page: {server.url}   server: {options.url}   Ctrl-C ends", flush=True)
        if options.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            return
