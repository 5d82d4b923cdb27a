"""`python -m test.engine.families.matrix [NAMES]` prints the table of docs/models.md.

It serves a tiny checkpoint of each family without drafts, with lookups and with branching guesses;
the arguments are names of families, all if there are none. A family takes about half a minute.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from sglang.srt.plugins import load_plugins

from test.engine.families.checkpoints import FAMILIES, write
from test.engine.families.parity import Comparison, examine, first_line

SECONDS = 300
"""Time limit of a family."""
DISTINCT = 5
"""Fewest distinct tokens of the outputs; fewer compare nothing."""
HEADER = """| family | class | plain | lookups | guesses | why not |
|---|---|---|---|---|---|"""
# The processes are forked, because SGLang's imports take longer than the comparison.
_FORK = multiprocessing.get_context("fork")


def run(name: str) -> tuple[str, Comparison]:
    """The class of a family's model, empty if there is none, and its comparison."""
    receiver, sender = _FORK.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        child = _FORK.Process(target=_send, args=(name, Path(folder), sender))
        child.start()
        sender.close()
        try:
            if not receiver.poll(SECONDS):
                return "", Comparison(failed=f"no end in {SECONDS} s")
            found: tuple[str, Comparison] = receiver.recv()
            return found
        except EOFError:
            return "", Comparison(failed="the process ended")
        finally:
            child.kill()
            child.join()


def _send(name: str, folder: Path, sender: Connection) -> None:
    """Make the family's checkpoint at `folder`, and send what `run` returns."""
    try:
        write(folder, name)
    except Exception as error:  # noqa: BLE001 (a row of the table)
        sender.send(("", Comparison(failed=f"transformers: {first_line(error)}")))
    else:
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        found = examine(str(folder), {}, short=True)
        found.refused = found.refused.replace(str(folder), "PATH")
        sender.send((architecture, found))


def row(name: str, architecture: str, found: Comparison) -> str:
    """The family's row of the table."""
    plain = "yes" if found.plain else "no"
    if found.plain and len({token for output in found.plain for token in output}) < DISTINCT:
        plain = "repeats a token"
    reason = (found.refused or found.failed).replace("|", r"\|")
    cells = [name, architecture and f"`{architecture}`", plain]
    cells += [cell(found, kind) for kind in ("lookups", "guesses")]
    return f"| {' | '.join([*cells, reason])} |".replace("  ", " ")


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
