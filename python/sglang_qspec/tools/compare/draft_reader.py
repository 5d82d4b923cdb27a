"""Reads the target's answers with a draft model, as the sidecar runs it, in a process of its own.

SGLang has one configuration per process, so each candidate needs a new process. The process selects
its CPUs and device before it imports torch, as the sidecar does.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.compare.answers import Answer

if TYPE_CHECKING:
    import torch

    from sglang_qspec.sidecar.draft_model import DraftModel

ROWS = 8
"""Answers that are read at once. The CPU decoder for int8 weights computes larger passes with less
precision, so larger passes would agree less than those of a sidecar with a few requests."""
STEPS, WARM_UP_STEPS = 16, 3
"""Number of timed draft steps, and of steps before them."""
STEP_PROMPT_TOKENS = 256
"""Maximum number of prompt tokens before timed steps."""


@dataclass(frozen=True)
class Job:
    """What to measure of a candidate, and where."""

    path: str
    device: str
    """`cpu`, or `cuda:N`, numbered among the visible GPUs."""
    cpus: frozenset[int]
    """CPUs of its own; empty if it shares all with the target."""
    answers: Sequence[Answer]
    temperature: float
    """Sampling temperature of the answers with a seed."""
    in_flight: Sequence[int]
    """Numbers of rows for which steps are timed."""
    target_vocab: int
    """Number of token ids of the target."""
    dtype: str = "auto"
    quantization: str | None = None
    """SGLang's quantization method; None selects the checkpoint's."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Reading:
    """The measurements of a candidate."""

    agreed: list[list[bool]]
    """For each answer and position: whether the draft model chose the target's token."""
    step_seconds: dict[int, float]
    """Seconds of a draft step by the number of rows, sampling included."""
    memory_bytes: int
    """Memory of the process on a CPU, otherwise of torch on the GPU, with KV for the answers."""
    quantization: str | None
    dtype: str
    """Data type of the activations."""


def read(job: Job) -> Reading:
    """Measure a candidate in a new process. Raises QSpecError if its model cannot be loaded."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as process:
        try:
            return process.submit(_read, job).result()
        except BrokenProcessPool:
            raise QSpecError(f"the process of {job.path} ended before it was measured") from None


def _settle(device: str, cpus: frozenset[int]) -> None:
    """Select CPUs and device of this process, which has not imported torch yet."""
    from sglang_qspec.sidecar.hardware import halve_threads, settle_cores, settle_device

    os.dup2(2, 1)  # what SGLang prints must not be among the results
    logging.getLogger("sglang").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # SGLang's, about devices that this machine does not have
    settle_device(device)
    settle_cores(",".join(map(str, sorted(cpus))))
    if device == "cpu" and not cpus:
        halve_threads()


def _read(job: Job) -> Reading:
    _settle(job.device, job.cpus)
    from tqdm import tqdm

    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    longest = max(len(each.prompt_ids) + len(each.token_ids) for each in job.answers)
    rows = max(ROWS, *job.in_flight)
    name = os.path.basename(os.path.normpath(job.path))
    steps = 2 + len(job.answers) + len(job.in_flight)
    with tqdm(total=steps, desc=f"loading {name}") as progress:
        model = DraftModel(
            DraftModelOptions(
                job.path,
                dtype=job.dtype,
                quantization=job.quantization,
                device=job.device.split(":")[0],
                context_len=longest + STEPS + WARM_UP_STEPS + 1,
                max_total_tokens=rows * (longest + STEPS + WARM_UP_STEPS + 1),
                rows=rows,
                batch=rows,
                trust_remote_code=job.trust_remote_code,
            )
        )
        progress.update(2)
        progress.set_description(f"reading answers with {name}")
        agreed = []
        for each in agreed_along(model, job.answers, job.target_vocab, job.temperature):
            agreed.append(each)
            progress.update()
        progress.set_description(f"timing steps of {name}")
        seconds = {}
        for count in job.in_flight:
            seconds[count] = _step_seconds(model, job, count)
            progress.update()
        progress.set_description(name)
    return Reading(
        agreed,
        seconds,
        _memory_bytes(model.device),
        model.quantization,
        model.dtype,
    )


def _memory_bytes(device: str) -> int:
    import psutil
    import torch

    if device.startswith("cuda"):
        return torch.cuda.memory_reserved()
    return int(psutil.Process().memory_full_info().uss)


def agreed_along(
    model: DraftModel, answers: Sequence[Answer], target_vocab: int, temperature: float = 1.0
) -> Iterator[list[bool]]:
    """Whether the draft model chooses the target's token at each position of each answer.

    An answer is read up to the first id that the draft model does not have. Like a sidecar, it
    agrees with nothing from there on. `target_vocab` is the target's number of token ids, and
    `temperature` that of answers with a seed.
    """
    shared = min(target_vocab, model.vocab_size)
    for start in range(0, len(answers), ROWS):
        yield from _read_group(model, answers[start : start + ROWS], shared, temperature)


def _read_group(
    model: DraftModel, answers: Sequence[Answer], shared: int, temperature: float
) -> list[list[bool]]:
    """`agreed_along` for some answers, one row for each; both models have ids below `shared`."""
    agreed: list[list[bool]] = [[] for _ in answers]
    rows = {}
    logits = {}
    for place, answer in enumerate(answers):
        if max(answer.prompt_ids) < shared:
            rows[place] = model.rows.open()
            logits[place] = prefilled(model, rows[place], answer.prompt_ids)
    at = 0
    live = [place for place in rows if answers[place].token_ids]
    while live:
        batch = _joined(logits, live)
        chosen = _chosen(batch, [answers[place] for place in live], at, shared, temperature)
        for place, token in zip(live, chosen, strict=True):
            agreed[place].append(token == answers[place].token_ids[at])
        live = [
            place
            for place in live
            if at + 1 < len(answers[place].token_ids) and answers[place].token_ids[at] < shared
        ]
        if live:
            tokens = [answers[place].token_ids[at] for place in live]
            found = model.step([rows[place] for place in live], tokens)
            logits = {place: found[i : i + 1] for i, place in enumerate(live)}
        at += 1
    for row in rows.values():
        model.rows.close(row)
    return [
        own + [False] * (len(answer.token_ids) - len(own))
        for own, answer in zip(agreed, answers, strict=True)
    ]


def _joined(logits: dict[int, torch.Tensor], places: Sequence[int]) -> torch.Tensor:
    import torch

    return torch.cat([logits[place] for place in places])


def _chosen(
    logits: torch.Tensor, answers: Sequence[Answer], at: int, shared: int, temperature: float
) -> list[int]:
    """The draft model's tokens at position `at` of the answers, from `logits` float [n, vocab].

    They are drawn as the sidecar draws step drafts: greedily, or with the target's sampling seed.
    """
    from sglang_qspec.messages import SeededSampling
    from sglang_qspec.sidecar.sampling import GREEDY, choose_shared

    samplings = [
        GREEDY if each.seed is None else SeededSampling(each.seed, temperature) for each in answers
    ]
    positions = [len(each.prompt_ids) + at - 1 for each in answers]
    count = len(answers)
    return choose_shared(logits, samplings, [0] * count, positions, [shared] * count).token_ids


def prefilled(model: DraftModel, row: int, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits float [1, vocab] after a prompt, read in parts that the sidecar would read."""
    size = model.prefill_tokens
    parts = [list(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    for part in parts[:-1]:
        model.extend([row], [part])
    return model.extend([row], [parts[-1]]).clone()


def _step_seconds(model: DraftModel, job: Job, count: int) -> float:
    """Median seconds of a greedy step of `count` rows, the choice of the tokens included."""
    rows = []
    for answer in itertools.islice(itertools.cycle(job.answers), count):
        rows.append(model.rows.open())
        ids = [min(token, model.vocab_size - 1) for token in answer.prompt_ids]
        logits = prefilled(model, rows[-1], ids[:STEP_PROMPT_TOKENS])
    tokens = [int(logits.argmax())] * count
    times = list(itertools.islice(_steps(model, rows, tokens), WARM_UP_STEPS + STEPS))
    for row in rows:
        model.rows.close(row)
    return statistics.median(times[WARM_UP_STEPS:])


def _steps(model: Any, rows: list[int], tokens: list[int]) -> Iterator[float]:
    """Seconds of one step after another."""
    from sglang_qspec.sidecar.sampling import GREEDY, choose

    count = len(rows)
    while True:
        began = time.perf_counter()
        logits = model.step(rows, tokens)
        tokens = choose(logits, [GREEDY] * count, [0] * count, [0] * count).token_ids
        yield time.perf_counter() - began
