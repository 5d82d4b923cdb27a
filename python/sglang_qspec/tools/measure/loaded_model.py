"""`python -m sglang_qspec.tools.measure.loaded_model OPTIONS`: runs passes of one model.

OPTIONS are `ModelOptions` as JSON. The process reads a JSON object per line from standard input,
and answers each with a JSON object: the name of a method of `LoadedModel` in `do`, and its
arguments. The answer has `result`, or `error`. The process selects its CPUs and device before it
imports torch, as the sidecar does.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.measure.model_process import Answer, ModelOptions
from sglang_qspec.tools.models.prompts import chat_ids
from sglang_qspec.values import parse_cores

if TYPE_CHECKING:
    import torch

    from sglang_qspec.engine.placement.target_cores import TargetCores
    from sglang_qspec.sidecar.draft_model import DraftModel

MOST_PASSES = 64
"""Maximum number of passes of one measurement; KV rows have room for them."""
FEWEST_PASSES = 3
"""Minimum number of timed passes, after one that is not timed."""
ROWS = 8
"""Maximum number of answers that are read at once. The CPU decoder for int8 weights computes larger
passes with less precision, so larger passes would agree less than those of a sidecar with a few
requests."""


class LoadedModel:
    """Timed passes, greedy decoding and agreement of one loaded model."""

    def __init__(self, model: DraftModel, options: ModelOptions, cores: TargetCores | None) -> None:
        """`cores` divides the CPUs with the sidecar; None if they are not divided."""
        self._model = model
        self._options = options
        self._cores = cores
        self._rows: list[int] = []
        """Open rows for timed passes, each as long as its context."""

    def describe(self) -> dict[str, Any]:
        """The data type of the activations, and the quantization of the weights or None."""
        return {"dtype": self._model.dtype, "quantization": self._model.quantization}

    def memory_bytes(self) -> int:
        """Memory of the process on a CPU, otherwise of torch on the GPU."""
        import psutil
        import torch

        if self._model.device.startswith("cuda"):
            return torch.cuda.memory_reserved()
        return int(psutil.Process().memory_full_info().uss)

    def pass_seconds(self, rows: int, seconds: float, everything: bool = False) -> float:
        """Median seconds of decode passes over `rows` rows, measured for about `seconds`.

        The choice of the likeliest tokens, which the next pass reads, is included. With
        `everything` a target also uses the CPUs of the sidecar.
        """
        from sglang_qspec.sidecar.sampler import choose
        from sglang_qspec.sidecar.sampling import GREEDY

        if self._cores is not None:
            self._cores.use(everything=everything)
        used = self._opened(rows)
        tokens, none = [0] * rows, [0] * rows
        found: list[float] = []
        ends: float | None = None
        """End of the measurement, which begins after the first pass."""
        while (
            ends is None
            or len(found) < FEWEST_PASSES
            or (time.perf_counter() < ends and len(found) < MOST_PASSES)
        ):
            began = time.perf_counter()
            logits = self._model.step(used, tokens)
            tokens = choose(logits, [GREEDY] * rows, none, none).token_ids
            if ends is None:
                ends = time.perf_counter() + seconds
            else:
                found.append(time.perf_counter() - began)
        for row, context in zip(used, self._contexts(rows), strict=True):
            self._model.rows.truncate(row, len(context))
        return statistics.median(found)

    def _contexts(self, rows: int) -> list[list[int]]:
        """The context of each row."""
        contexts = self._options.contexts
        return [contexts[row % len(contexts)] for row in range(rows)]

    def _opened(self, rows: int) -> list[int]:
        """The first `rows` rows for timed passes; opens those that are missing."""
        count = len(self._options.contexts)
        for place, context in enumerate(self._contexts(rows)):
            if place < len(self._rows):
                continue
            if place < count:
                self._rows.append(self._model.rows.open())
                most = self._model.vocab_size - 1  # a target may have more ids
                self._prefill(self._rows[place], [min(token, most) for token in context])
            else:
                self._rows.append(self._model.rows.fork(self._rows[place % count], len(context)))
        return self._rows[:rows]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, in the model's chat template if it has one."""
        from sglang_qspec.engine.sidecar.model_pair import load_tokenizer

        return chat_ids(load_tokenizer(self._options.path, False, None), texts)

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy continuations of at most `tokens` tokens; each ends before an end of text."""
        rows = [self._model.rows.open() for _ in prompts]
        last = [
            int(self._prefill(row, prompt).argmax())
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        outputs = [[token] for token in last]
        for _ in range(tokens - 1):
            last = self._model.step(rows, last).argmax(-1).tolist()
            for output, token in zip(outputs, last, strict=True):
                output.append(token)
        for row in rows:
            self._model.rows.close(row)
        return [self._until_end(output) for output in outputs]

    def _until_end(self, output: list[int]) -> list[int]:
        ends = (place for place, each in enumerate(output) if each in self._model.eos_token_ids)
        return output[: next(ends, len(output))]

    def agreed(
        self, answers: Sequence[Any], target_vocab: int, temperature: float = 1.0
    ) -> list[list[bool]]:
        """Whether the model chooses the target's token at each position of ROWS `answers` at most.

        An answer is read up to the first id that the model does not have. Like a sidecar, it agrees
        with nothing from there on. `target_vocab` is the target's number of token ids, and
        `temperature` that of answers with a seed.
        """
        read = msgspec.convert(answers, list[Answer])
        shared = min(target_vocab, self._model.vocab_size)
        agreed: list[list[bool]] = [[] for _ in read]
        rows: dict[int, int] = {}
        """KV row of each answer with a readable prompt, by the index of the answer."""
        logits: dict[int, torch.Tensor] = {}
        for place, answer in enumerate(read):
            if max(answer.prompt_ids) < shared:
                rows[place] = self._model.rows.open()
                logits[place] = self._prefill(rows[place], answer.prompt_ids)
        at = 0
        live = [place for place in rows if read[place].token_ids]
        while live:
            batch = [logits[place] for place in live]
            chosen = _chosen(batch, [read[place] for place in live], at, shared, temperature)
            for place, token in zip(live, chosen, strict=True):
                agreed[place].append(token == read[place].token_ids[at])
            live = [
                place
                for place in live
                if at + 1 < len(read[place].token_ids) and read[place].token_ids[at] < shared
            ]
            if live:
                tokens = [read[place].token_ids[at] for place in live]
                found = self._model.step([rows[place] for place in live], tokens)
                logits = {place: found[i : i + 1] for i, place in enumerate(live)}
            at += 1
        for row in rows.values():
            self._model.rows.close(row)
        return [
            own + [False] * (len(answer.token_ids) - len(own))
            for own, answer in zip(agreed, read, strict=True)
        ]

    def _prefill(self, row: int, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits float [1, vocab] after a prompt, read in parts that the sidecar would read."""
        size = self._model.prefill_tokens
        parts = [list(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
        for part in parts[:-1]:
            self._model.extend([row], [part])
        return self._model.extend([row], [parts[-1]]).clone()


def _chosen(
    logits: Sequence[torch.Tensor],
    answers: Sequence[Answer],
    at: int,
    shared: int,
    temperature: float,
) -> list[int]:
    """The model's tokens at position `at` of the answers, from their `logits`, float [1, vocab].

    They are drawn as the sidecar draws step drafts: greedily, or with the target's sampling seed.
    Both models have the ids below `shared`.
    """
    import torch

    from sglang_qspec.messages import SeededSampling
    from sglang_qspec.sidecar.sampler import choose
    from sglang_qspec.sidecar.sampling import GREEDY

    samplings = [
        GREEDY if each.seed is None else SeededSampling(each.seed, temperature) for each in answers
    ]
    positions = [len(each.prompt_ids) + at - 1 for each in answers]
    none, sizes = [0] * len(answers), [shared] * len(answers)
    return choose(torch.cat(list(logits)), samplings, none, positions, sizes).token_ids


METHODS = ("describe", "memory_bytes", "pass_seconds", "encode", "greedy", "agreed")


def main(argv: Sequence[str]) -> int:
    """Load the model and answer until standard input ends. Returns 0, or 1 if loading fails."""
    options = msgspec.json.decode(argv[0], type=ModelOptions)
    # Answers go to the real standard output, and what SGLang prints to standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        loaded = _load(options)
    except QSpecError as error:
        _answer(answers, {"error": str(error)})
        return 1
    for line in sys.stdin.buffer:
        question: dict[str, Any] = msgspec.json.decode(line)
        name = question.pop("do")
        assert name in METHODS, name
        try:
            _answer(answers, {"result": getattr(loaded, name)(**question)})
        except (QSpecError, RuntimeError) as error:  # torch raises RuntimeError
            _answer(answers, {"error": str(error)})
    return 0


def _answer(answers: BinaryIO, content: dict[str, Any]) -> None:
    answers.write(msgspec.json.encode(content) + b"\n")
    answers.flush()


def _load(options: ModelOptions) -> LoadedModel:
    from sglang_qspec.sidecar.hardware import (
        halve_threads,
        lower_priority,
        settle_cores,
        settle_device,
    )

    kind = settle_device(options.device)
    settle_cores(options.cores)
    if options.halves_threads:
        halve_threads()
    # These import torch, so they follow the settings of CPUs and device.
    from sglang_qspec.engine.placement.target_cores import TargetCores
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    model = DraftModel(
        DraftModelOptions(
            options.path,
            device=kind,
            dtype=options.dtype,
            quantization=options.quantization,
            load_format=options.load_format,
            attention_backend=options.attention_backend,
            mem_fraction=options.mem_fraction or None,
            max_total_tokens=options.tokens,
            context_len=options.context_len,
            rows=options.rows,
            batch=options.rows,
            trust_remote_code=options.trust_remote_code,
        ),
        drafts_only=not options.target,
    )
    if options.background:
        lower_priority(idle=True)
    shared = parse_cores(options.shared)
    return LoadedModel(model, options, TargetCores(shared) if shared else None)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # The interpreter's teardown of torch and SGLang takes seconds.
    os._exit(code)
