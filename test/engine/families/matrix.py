"""`python -m test.engine.families.matrix [NAMES]` prints the table of docs/models.md.

It serves a tiny checkpoint of each family without drafts, with lookups and with branching guesses,
and loads it as a draft model. The arguments are names of families, all if there are none. A family
takes about half a minute.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # before SGLang is imported

from sglang.srt.plugins import load_plugins

from test.engine.families.checkpoints import FAMILIES, write
from test.engine.families.drafting import Drafts, continue_prompts
from test.engine.families.parity import SHORT, Comparison, examine, first_line

SECONDS = 300
"""Time limit of a part of a family's row."""
DISTINCT = 5
"""Fewest distinct tokens of the outputs; fewer compare nothing."""
HEADER = """| family | class | plain | lookups | guesses | draft model | why not |
|---|---|---|---|---|---|---|"""
# The processes are forked, because SGLang's imports take longer than the comparison.
_FORK = multiprocessing.get_context("fork")


def run(name: str) -> tuple[str, Comparison, Drafts]:
    """The class of a family's model, empty if there is none, its comparison, and its drafts."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        served = _in_child(_serve, name, folder)
        if isinstance(served, str):
            return "", Comparison(failed=served), Drafts()
        architecture, found = served
        drafts = _in_child(continue_prompts, path, SHORT) if found.plain else Drafts()
        return architecture, found, Drafts(failed=drafts) if isinstance(drafts, str) else drafts


def _in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a process of its own; a text if the process gives none."""
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_send, args=(sender, function, *arguments))
    child.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            return f"no end in {SECONDS} s"
        return receiver.recv()
    except EOFError:
        return "the process ended"
    finally:
        child.kill()
        child.join()


def _send(sender: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    sender.send(function(*arguments))


def _serve(name: str, folder: Path) -> tuple[str, Comparison]:
    """Make the family's checkpoint at `folder`, and serve it. Returns its class too."""
    try:
        write(folder, name)
    except Exception as error:  # noqa: BLE001 (a row of the table)
        return "", Comparison(failed=f"transformers: {first_line(error)}")
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    found = examine(str(folder), {}, short=True)
    found.refused = found.refused.replace(str(folder), "PATH")
    return architecture, found


def row(name: str, architecture: str, found: Comparison, drafts: Drafts) -> str:
    """The family's row of the table."""
    plain = "yes" if found.plain else "no"
    if found.plain and len({token for output in found.plain for token in output}) < DISTINCT:
        plain = "repeats a token"
    reason = first_sentence(found.refused or found.failed or drafts.failed).replace("|", r"\|")
    cells = [name, architecture and f"`{architecture}`", plain]
    cells += [cell(found, kind) for kind in ("lookups", "guesses")]
    cells += [draft_cell(found, drafts) if found.plain else ""]
    return f"| {' | '.join([*cells, reason])} |".replace("  ", " ")


def first_sentence(text: str) -> str:
    """The text up to the first full stop that ends a sentence, which it then leaves out."""
    return re.split(r"\.(?= [A-Z])|\.$", text, maxsplit=1)[0]


def draft_cell(found: Comparison, drafts: Drafts) -> str:
    """Whether a draft model with the target's weights gives the plain outputs."""
    if drafts.failed:
        return "no"
    equal = drafts.of_rows == drafts.of_forks == found.plain
    return "equal" if equal else "**differs**"


def cell(found: Comparison, kind: str) -> str:
    """Whether all outputs with drafts of a kind are the plain outputs; empty if none came."""
    cases = [case for case in found.drafted if kind in case]
    accepted = sum(found.accepted[case] for case in cases)
    if not cases:
        return ""
    if any(found.drafted[case] != found.plain for case in cases):
        return "**differs**"
    if not accepted:
        return "none accepted"
    return f"equal ({accepted})" if found.branching or kind == "lookups" else "no branches"


def main(names: list[str]) -> None:
    load_plugins()
    print(HEADER, flush=True)  # noqa: T201
    for name in names or FAMILIES:
        print(row(name, *run(name)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
