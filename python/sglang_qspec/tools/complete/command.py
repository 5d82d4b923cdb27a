"""The command `qspec complete`: its options and its output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

from sglang_qspec import values
from sglang_qspec.tools import declare
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.complete.marks import Brackets, Colours, Marks, summary
from sglang_qspec.tools.complete.peers import printable, reading
from sglang_qspec.tools.complete.pieces import end_of, labels, whole
from sglang_qspec.tools.complete.stretches import Stretch, Stretches
from sglang_qspec.tools.guesses import earlier
from sglang_qspec.tools.guesses.earlier import EarlierAnswers
from sglang_qspec.tools.guesses.guess import joined, limits_in

DESCRIPTION = """Ask a running QSPEC server for a completion, and print it while it is generated.
--show-drafts marks drafted text with the source of its draft: in colours on a terminal, otherwise
in brackets."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    add("prompt", "text to complete; it may contain <NGRAMGUESS> tags")
    declare.server(parser)
    declare.switch(parser, "--show-drafts", "mark drafted text with its source")
    add("--max-new-tokens", "maximum number of output tokens", values.positive, "N", default=128)
    earlier.add_option(parser)
    temperature = values.number(0.0, 100.0)
    add("--temperature", "sampling temperature; 0 is greedy", temperature, "T", default=0.0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, say: Callable[..., object] = print) -> None:
    """Print the completion, piece by piece. Raises ClientError.

    The text has no characters that a terminal obeys, except those that mark drafts.
    """
    client = Client(options.url)
    limits = limits_in(client.state())
    with EarlierAnswers.open(options.guesses_from) as answers:
        guesses = answers.texts(options.prompt, limits)
    custom = {"qspec_return_provenance": True} if options.show_drafts else {}
    sampling: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "custom_params": joined(custom, guesses),
    }
    with reading(client.url), closing(client.generate(options.prompt, sampling)) as pieces:
        if options.show_drafts:
            marks = Colours() if sys.stdout.isatty() else Brackets()
            texts = _marked(client, pieces, marks)
        else:
            texts = _plain(pieces)
        for text in texts:
            say(text, end="", flush=True)


def _plain(pieces: Iterator[dict[str, Any]]) -> Iterator[str]:
    shown = ""
    piece: dict[str, Any] = {}
    for piece in whole(pieces):
        yield printable(piece["text"][len(shown) :])
        shown = piece["text"]
    yield "\n"
    end_of(piece)


def _marked(client: Client, pieces: Iterator[dict[str, Any]], marks: Marks) -> Iterator[str]:
    stretches = Stretches(client.decode)
    piece: dict[str, Any] = {"text": ""}
    provenance: list[str] = []
    passes = 0
    for piece in whole(pieces):
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
