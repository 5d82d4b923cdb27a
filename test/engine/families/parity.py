"""Compares drafts with no drafts over a checkpoint, with SGLang's scheduler in this process.

The program reads the path of a model and SGLang's arguments from the standard input, and prints a
`Comparison` as JSON. It runs in a process of its own, since SGLang has one configuration per
process. A start that is refused or fails is a part of the comparison.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang.srt.plugins import load_plugins

from sglang_qspec.errors import QSpecError
from test.engine.cuda.serving import OFF, Serving

WIDTH, LENGTH, SHORT = 16, 64, 32
TOKENS = range(3, 19)
"""Tokens of the prompts and outputs; they are few, so that some lookups are right."""


@dataclass
class Comparison:
    """The greedy outputs of the prompts, as far as the server came."""

    plain: list[list[int]] = field(default_factory=list)
    """Without drafts."""
    drafted: dict[str, list[list[int]]] = field(default_factory=dict)
    """By kind of pass and draft: outputs with drafts."""
    accepted: dict[str, int] = field(default_factory=dict)
    """By kind of pass and draft: number of accepted draft tokens."""
    branching: bool = False
    """Whether the passes verified a tree that is no chain."""
    refused: str = ""
    """QSPEC's refusal to start; empty if there is none."""
    failed: str = ""
    """The type and the first line of the error that ended the start or a pass; empty if none."""


def prompts() -> list[list[int]]:
    """Shorter and longer than windows and chunks, two with one beginning, and one that repeats."""
    rng = random.Random(3)
    begin = [rng.choice(TOKENS) for _ in range(100)]
    texts = [[rng.choice(TOKENS) for _ in range(length)] for length in (5, 20, 45)]
    return [*texts, begin, [*begin[:70], *begin[10:40]], begin[:8] * 9]


def guesses(output: list[int]) -> list[list[int]]:
    """Pieces of the output, right and with wrong endings, so that trees branch and are cut."""
    rng = random.Random(5)
    found = []
    for start in range(0, len(output), 6):
        piece = output[start : start + 14]
        found.append(piece)
        for _ in range(3):
            kept = rng.randrange(1, max(2, len(piece)))
            found.append([*piece[:kept], *(rng.choice(TOKENS) for _ in range(4))])
    rng.shuffle(found)
    return found


def compare(serving: Serving, found: Comparison, *, short: bool) -> None:
    """Serve the prompts without drafts, and with lookups and guesses in passes of each kind.

    Ragged passes are left out if the server has none (multimodal rotary positions). A `short`
    comparison has shorter outputs, and no drafts in prefills.
    """
    texts = prompts()

    def serve(custom: dict[str, Any], given: Sequence[Sequence[Any]] = ()) -> Any:
        own = {
            "custom_params": custom,
            "max_new_tokens": SHORT if short else LENGTH,
            "logit_bias": {str(token): 100.0 for token in TOKENS},
        }
        return serving.serve([own] * len(texts), given, texts)

    found.plain = serve(OFF).outputs
    given = [guesses(output) for output in found.plain]
    verify = serving.worker._verify_input

    def watched(decided: Any) -> Any:
        if decided.trees is not None:
            found.branching |= not decided.trees.are_chains
        return verify(decided)

    serving.worker._verify_input = watched
    for ragged in (True, False) if serving.worker._runtime.ragged else (False,):
        for prefill in (False,) if short else (False, True):
            with serving.settings(fixed_width=True, ragged=ragged, prefill_drafts=prefill):
                for kind, hints in (("lookups", ()), ("guesses", given)):
                    record = serve({}, hints)
                    case = f"{'ragged' if ragged else 'one width'}, {kind}"
                    case += ", prefills too" if prefill else ""
                    found.drafted[case] = record.outputs
                    found.accepted[case] = record.accepted


def examine(model: str, arguments: dict[str, Any], *, short: bool = False) -> Comparison:
    """Start a server with the checkpoint and SGLang's arguments in this process, and `compare`."""
    os.dup2(2, 1)  # SGLang may print
    sizes = {"context_length": 256, "disable_radix_cache": False, "chunked_prefill_size": 32}
    widest = {"speculative_num_draft_tokens": WIDTH, "max_running_requests": 4}
    found = Comparison()
    try:
        compare(Serving(model, "cpu", **{**sizes, **widest, **arguments}), found, short=short)
    except QSpecError as error:
        found.refused = str(error)
    except Exception as error:  # noqa: BLE001 (a part of the comparison)
        traceback.print_exc()
        found.failed = first_line(error)
    return found


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def main() -> None:
    sys.stdout = os.fdopen(os.dup(1), "w")
    model, arguments = json.load(sys.stdin)
    load_plugins()
    sys.stdout.write(json.dumps(asdict(examine(model, arguments))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without waiting for a receiver of the scheduler's messages


if __name__ == "__main__":
    main()
