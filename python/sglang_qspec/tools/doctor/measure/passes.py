"""`python -m sglang_qspec.tools.doctor.measure.passes`: runs passes of one model for the doctor.

SGLang has one configuration per process, so each model has a process of its own. The process reads
a JSON object per line from standard input, and answers each with a JSON object: the name of a
method of `Passes` in `do`, and its arguments. The answer has `result`, or `error`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.compare.answers import Answer
from sglang_qspec.tools.compare.draft_reader import agreed_along, prefilled
from sglang_qspec.tools.models.prompts import chat_ids
from sglang_qspec.values import parse_cores

if TYPE_CHECKING:
    from sglang_qspec.engine.placement.target_cores import TargetCores
    from sglang_qspec.sidecar.draft_model import DraftModel

CONTEXT = 128
"""Tokens before the first token of a timed pass."""
MOST_PASSES = 64
"""Maximum number of passes of one measurement; KV rows have room for them."""


class Passes:
    """Timed passes, greedy decoding and agreement of one loaded model."""

    def __init__(self, model: DraftModel, path: str, cores: TargetCores | None) -> None:
        """`cores` divides the CPUs with the sidecar; None if they are not divided."""
        self._model = model
        self._path = path
        self._cores = cores
        self._rows: list[int] = []

    def ready(self) -> str:
        """Description of the loaded model: its data type, and its quantization if it has one."""
        return " ".join(filter(None, (self._model.dtype, self._model.quantization)))

    def seconds(self, rows: int, seconds: float, everything: bool = False) -> float:
        """Median seconds of decode passes over `rows` rows, measured for about `seconds`.

        With `everything` a target also uses the CPUs of the sidecar.
        """
        if self._cores is not None:
            self._cores.use(everything=everything)
        self._open(rows)
        used = self._rows[:rows]
        found: list[float] = []
        began = time.perf_counter()
        self._step(used, [0] * rows)
        while not found or (time.perf_counter() - began < seconds and len(found) < MOST_PASSES):
            start = time.perf_counter()
            self._step(used, [0] * rows)
            found.append(time.perf_counter() - start)
        for row in used:
            self._model.rows.truncate(row, CONTEXT)
        return statistics.median(found)

    def _open(self, rows: int) -> None:
        """Open rows of CONTEXT tokens until there are `rows`; they share the KV of the first."""
        if not self._rows:
            row = self._model.rows.open()
            self._model.extend([row], [list(range(CONTEXT))])
            self._rows.append(row)
        while len(self._rows) < rows:
            self._rows.append(self._model.rows.fork(self._rows[0], CONTEXT))

    def _step(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """One decode pass; the likeliest next token of each row. Waits for the device."""
        likeliest: list[int] = self._model.step(rows, token_ids).argmax(-1).tolist()
        return likeliest

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, in the model's chat template if it has one."""
        from sglang_qspec.engine.sidecar.model_pair import load_tokenizer

        return chat_ids(load_tokenizer(self._path, False, None), texts)

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations of at most `tokens` tokens; each ends before an end of text."""
        rows = [self._model.rows.open() for _ in prompts]
        last = [
            int(prefilled(self._model, row, prompt).argmax())
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        outputs = [[token] for token in last]
        for _ in range(tokens - 1):
            last = self._step(rows, last)
            for output, token in zip(outputs, last, strict=True):
                output.append(token)
        for row in rows:
            self._model.rows.close(row)
        return [self._until_end(output) for output in outputs]

    def _until_end(self, output: list[int]) -> list[int]:
        ends = (place for place, each in enumerate(output) if each in self._model.eos_token_ids)
        return output[: next(ends, len(output))]

    def agreed(
        self, prompts: Sequence[list[int]], texts: Sequence[list[int]], target_vocab: int
    ) -> list[list[bool]]:
        """Whether the model also finds each token of `texts` likeliest, after the target's own.

        `target_vocab` is the target's number of token ids.
        """
        answers = [Answer(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        return list(agreed_along(self._model, answers, target_vocab))


METHODS = ("ready", "seconds", "encode", "greedy", "agreed")


def main(argv: Sequence[str]) -> int:
    """Load the model and answer until standard input ends. Returns 0, or 1 if loading fails."""
    options = _parser().parse_args(argv)
    # Answers go to the real standard output, and what SGLang prints to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        passes = _load(options)
    except QSpecError as error:
        _answer(answers, {"error": str(error)})
        return 1
    for line in sys.stdin:
        question: dict[str, Any] = json.loads(line)
        name = question.pop("do")
        assert name in METHODS, name
        try:
            _answer(answers, {"result": getattr(passes, name)(**question)})
        except (QSpecError, RuntimeError) as error:  # torch raises RuntimeError
            _answer(answers, {"error": str(error)})
    return 0


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _load(options: argparse.Namespace) -> Passes:
    from sglang_qspec.sidecar.hardware import lower_priority, settle_cores, settle_device

    kind = settle_device(options.device)
    settle_cores(options.cores)
    # These import torch, so they follow the settings of CPUs and device.
    from sglang_qspec.engine.placement.target_cores import TargetCores
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    model = DraftModel(
        DraftModelOptions(
            options.model_path,
            device=kind,
            dtype=options.dtype,
            mem_fraction=options.mem_fraction or None,
            max_total_tokens=options.tokens,
        ),
        drafts_only=not options.target,
    )
    if options.background:
        lower_priority(idle=True)
    shared = parse_cores(options.shared)
    return Passes(model, options.model_path, TargetCores(shared) if shared else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang_qspec.tools.doctor.measure.passes")
    add = parser.add_argument
    add("--model-path", required=True)
    add("--device", default="")
    add("--dtype", default="auto")
    add("--mem-fraction", type=float, default=0.0)
    add("--tokens", type=int, default=16384, help="maximum number of KV slots")
    add("--cores", default="", help="CPUs to run on; default: all")
    add("--shared", default="", help="CPUs of the sidecar, which a target can also use")
    add("--background", action="store_true", help="run while nothing else wants the CPUs")
    add("--target", action="store_true", help="compute as a target does")
    return parser


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # The interpreter's teardown of torch and SGLang takes seconds.
    os._exit(code)
