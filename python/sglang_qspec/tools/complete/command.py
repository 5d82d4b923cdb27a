"""The command `qspec complete`: its options and its output."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from sglang_qspec import values
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.complete.marks import Brackets, Colours, Marks, summary
from sglang_qspec.tools.complete.peers import printable, reading
from sglang_qspec.tools.complete.pieces import end_of, labels, whole
from sglang_qspec.tools.complete.stretches import Stretch, Stretches
from sglang_qspec.values import option

DESCRIPTION = """Ask a running QSPEC server for a completion, and print it while it is generated.
--show-drafts marks drafted text with the source of its draft: in colours on a terminal, otherwise
in brackets."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("prompt", help="text to complete; it may contain <NGRAMGUESS> tags")
    add(
        "--url",
        default="http://127.0.0.1:30000",
        help="address of the server (default: %(default)s)",
    )
    add("--show-drafts", action="store_true", help="mark drafted text with its source")
    add(
        "--max-new-tokens",
        type=option(values.positive),
        default=128,
        metavar="N",
        help="maximum number of output tokens (default: %(default)s)",
    )
    add(
        "--temperature",
        type=option(values.number(0.0, 100.0)),
        default=0.0,
        metavar="T",
        help="sampling temperature (default: 0, greedy)",
    )


def run(options: argparse.Namespace, *, colours: bool) -> Iterator[str]:
    """Yield the text to print, piece by piece. Raises ClientError.

    The text has no characters that a terminal obeys, except those that mark drafts.
    """
    client = Client(options.url)
    client.check()
    sampling: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
    }
    with reading(client.url):
        if options.show_drafts:
            sampling["custom_params"] = {"qspec_return_provenance": True}
            marks = Colours() if colours else Brackets()
            yield from _marked(client, options.prompt, sampling, marks)
        else:
            yield from _plain(client, options.prompt, sampling)


def _plain(client: Client, prompt: str, sampling: dict[str, Any]) -> Iterator[str]:
    shown = ""
    piece: dict[str, Any] = {}
    for piece in whole(client.generate(prompt, sampling)):
        yield printable(piece["text"][len(shown) :])
        shown = piece["text"]
    yield "\n"
    end_of(piece)


def _marked(client: Client, prompt: str, sampling: dict[str, Any], marks: Marks) -> Iterator[str]:
    stretches = Stretches(client.decode)
    piece: dict[str, Any] = {"text": ""}
    provenance: list[str] = []
    passes = 0
    for piece in whole(client.generate(prompt, sampling)):
        meta = piece["meta_info"]
        provenance = labels(piece)
        passes = int(meta.get("qspec", {}).get("passes", passes))
        for stretch in stretches.take(piece["text"], piece["output_ids"], provenance):
            yield marks.mark(_printable(stretch))
    for stretch in stretches.finish(piece["text"], provenance):
        yield marks.mark(_printable(stretch))
    yield marks.end() + "\n\n"
    yield summary(provenance, passes, marks) + "\n"
    end_of(piece)


def _printable(stretch: Stretch) -> Stretch:
    return Stretch(printable(stretch.source), printable(stretch.text))
