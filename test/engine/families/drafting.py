"""Lets the sidecar's draft model continue prompts, to compare it with a target of the same weights.

The target's outputs need all that a draft model does for them: passes over several prompts, decode
steps over several rows, rows that share the beginning of another, and rows that are cut.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang_qspec.errors import QSpecError
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.loading import DraftModelOptions
from test.engine.families.parity import TOKENS, first_line, prompts

TAKEN_BACK = 7
"""Number of tokens that a row is cut by, after which it drafts them again."""


@dataclass
class Drafts:
    """Greedy continuations of `parity.prompts`, as far as the draft model came."""

    of_rows: list[list[int]] = field(default_factory=list)
    """By rows with a prompt of their own."""
    of_forks: list[list[int]] = field(default_factory=list)
    """By rows that share their prompts with the others, and were cut once."""
    failed: str = ""
    """The refusal, or the type and the first line of the error, that ended it; empty if none."""


def continue_prompts(model: str, length: int) -> Drafts:
    """Load the checkpoint as a draft model in this process; draft `length` tokens for each prompt.

    As in `parity`, only TOKENS may come.
    """
    found = Drafts()
    try:
        draft_model = DraftModel(
            DraftModelOptions(
                model, dtype="float32", device="cpu", max_total_tokens=4096, prefill_tokens=1024
            )
        )
        given = prompts()
        rows = [draft_model.rows.open() for _ in given]
        # All but the last tokens, so that forks end before the first token of the output.
        draft_model.extend(rows, [prompt[:-1] for prompt in given])
        forks = [
            draft_model.rows.fork(row, len(prompt) - 1)
            for row, prompt in zip(rows, given, strict=True)
        ]
        found.of_rows = _draft(draft_model, rows, [prompt[-1] for prompt in given], length)
        again = _draft(draft_model, forks, [prompt[-1] for prompt in given], length)
        for row, fork in enumerate(forks):
            draft_model.rows.truncate(fork, draft_model.rows.length(fork) - TAKEN_BACK)
            del again[row][length - TAKEN_BACK :]
        ends = [output[-1] for output in again]
        rest = _draft(draft_model, forks, ends, TAKEN_BACK)
        found.of_forks = [output + more for output, more in zip(again, rest, strict=True)]
        draft_model.rows.check_integrity()
    except QSpecError as error:
        found.failed = str(error).replace(model, "PATH")
    except Exception as error:  # noqa: BLE001 (a part of the comparison)
        traceback.print_exc()
        found.failed = first_line(error)
    return found


def _draft(model: DraftModel, rows: list[int], last: Sequence[int], length: int) -> list[list[int]]:
    """Append the last tokens and then the likeliest ones; return `length` tokens of each row."""
    outputs: list[list[int]] = [[] for _ in rows]
    allowed = torch.tensor(list(TOKENS))
    tokens = list(last)
    for _ in range(length):
        logits = model.step(rows, tokens)
        tokens = allowed[logits[:, allowed].argmax(1)].tolist()
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
    return outputs
