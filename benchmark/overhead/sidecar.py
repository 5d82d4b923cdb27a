"""Measures the host's time for a draft step of the sidecar, on a stubbed model as on a GPU.

The drafter runs on torch's device `meta`, whose tensors have no values. The model's
forward pass, the sampling kernels and the copies themselves are stubbed. All else runs: planning,
KV slots, the parameters of sampling, the arrays of the one upload, the inputs of each pass, the
tokens of each completion, and the messages to the server. The time is the CPU time of the drafter's
thread. Passes that read prompts do not count, and neither does the link.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from sglang_qspec import transfers
from sglang_qspec.config import QSpecConfig
from sglang_qspec.link import Peer
from sglang_qspec.messages import Admit, Commit, Commits, Submit
from sglang_qspec.sidecar.batch_scheduler import READ_ON_GPU
from sglang_qspec.sidecar.burst import MOST_BURSTS, MOST_PASSES
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.sampler import Sampler

DEVICE = torch.device("meta")
VOCAB, TOKEN, END = 150_000, 7, 2
"""Number of token ids, the one that is always drafted, and the one that ends a text."""
PROMPT, TOKENS, LOOKAHEAD, COMMITS = 64, 512, 8, 64
"""Numbers of tokens of a prompt, a completion and a step draft, and of commits of a request."""
ROUNDS = 7
SERVER = Peer("server", b"1", VOCAB)
SETTINGS = QSpecConfig()


class StubbedModel(DraftModel):
    """A draft model whose passes compute nothing."""

    def __init__(self, rows: int) -> None:
        """Have KV for `rows` rows."""
        context = PROMPT + TOKENS + LOOKAHEAD
        self._device = DEVICE
        table = torch.zeros(1 + rows, context, dtype=torch.int32, device=DEVICE)
        self.rows = KVRows(table, context, np.arange(1, rows * context + 1))
        self._logits = torch.empty(rows, VOCAB, device=DEVICE)
        self.prefills = self.steps = 0

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({END})

    def _forward(self, **fields: Any) -> torch.Tensor:
        if "extend_num_tokens" in fields:
            self.prefills += 1
        else:
            self.steps += 1
        return self._logits[: fields["batch_size"]]


@contextmanager
def stubs() -> Iterator[None]:
    """Within this context nothing takes time on DEVICE, and the host reads TOKEN from it."""
    event = SimpleNamespace(synchronize=lambda: None)

    def draw(_: Sampler, logits: torch.Tensor, number: int = 0) -> torch.Tensor:  # noqa: ARG001
        return torch.empty(len(logits), dtype=torch.int64, device=DEVICE)

    with ExitStack() as stack:
        for owner, name, double in (
            (transfers, "_upload", lambda packed, device: packed.to(device)),
            (transfers, "_download", lambda tensor: torch.full(tensor.shape, TOKEN)),
            (transfers, "_event", lambda _: event),
            (Sampler, "draw", draw),
        ):
            stack.enter_context(patch.object(owner, name, double))
        yield


class StubbedSidecar:
    """A drafter as a sidecar on a GPU has it, and the host's time for its work."""

    def __init__(self, rows: int) -> None:
        """Draft up to `rows` completions in a pass, with KV for four times as many."""
        self.model = StubbedModel(4 * rows)
        self.drafter = Drafter(
            self.model,
            slots=rows,
            prefill_tokens=READ_ON_GPU,
            most_passes=MOST_PASSES,
            most_bursts=MOST_BURSTS,
        )
        self._seconds = self._commit_seconds = 0.0
        self._steps = self._commits = 0

    def submit(self, number: int, completions: int) -> None:
        """Send a prompt, for which this many completions are drafted."""
        prompt = [number] * PROMPT
        submit = Submit(number, prompt, 0, TOKENS, completions, SETTINGS.temperature)
        self.drafter.handle(SERVER, submit)

    def commit(self, requests: int, place: int) -> None:
        """Commit the token at this place of each request's output, which was drafted."""
        began = time.thread_time()
        commits = [Commit(number, place, [TOKEN], LOOKAHEAD) for number in range(requests)]
        self.drafter.handle(SERVER, Commits(commits))
        self._commit_seconds += time.thread_time() - began
        self._commits += 1

    def step(self) -> None:
        """Let the drafter run its next pass or bursts, and take the messages as the loop does."""
        model, drafter = self.model, self.drafter
        prefills, steps, began = model.prefills, model.steps, time.thread_time()

        def ends() -> bool:
            drafter.take()
            return False

        drafter.step(ends)
        drafter.take()
        if model.prefills == prefills:
            self._seconds += time.thread_time() - began
            self._steps += model.steps - steps

    @property
    def step_ms(self) -> float:
        """The host's time for a pass of the draft model, in ms."""
        return self._seconds / self._steps * 1e3

    @property
    def commits_ms(self) -> float | None:
        """The host's time for the commits of all requests between two steps; None without any."""
        return self._commit_seconds / self._commits * 1e3 if self._commits else None


def waiting(rows: int, completions: int) -> StubbedSidecar:
    """Waiting requests with this many completions each, which are drafted to their end."""
    load = StubbedSidecar(rows)
    for number in range(max(1, rows // completions)):
        load.submit(number, completions)
    while not load.drafter.idle:
        load.step()
    return load


def running(rows: int) -> StubbedSidecar:
    """Running requests, each of which commits a token before each step."""
    load = StubbedSidecar(rows)
    for number in range(rows):
        load.submit(number, 0)
        load.drafter.handle(SERVER, Admit(number))
    for place in range(COMMITS):
        load.commit(rows, place)
        load.step()
    return load


LOADS: Mapping[str, Callable[[int], StubbedSidecar]] = {
    "queue drafts, 1 completion": lambda rows: waiting(rows, 1),
    f"queue drafts, {SETTINGS.completions} completions": lambda rows: waiting(
        rows, SETTINGS.completions
    ),
    "step drafts": running,
}


def measure(rows: int) -> list[dict[str, Any]]:
    """The host's times for steps over this many rows: a record of each of LOADS, in ms."""
    torch.set_num_threads(1)
    with stubs():
        found = [{name: load(rows) for name, load in LOADS.items()} for _ in range(1 + ROUNDS)][1:]
    return [
        {
            "load": name,
            "rows": rows,
            "step_ms": statistics.median(each[name].step_ms for each in found),
            "least_ms": min(each[name].step_ms for each in found),
            "most_ms": max(each[name].step_ms for each in found),
            "commits_ms": _median(each[name].commits_ms for each in found),
        }
        for name in LOADS
    ]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
