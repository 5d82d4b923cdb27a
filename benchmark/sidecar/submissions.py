"""What the drafter's own work costs with many live requests, of one prompt or of different ones.

The requests are sampled, each with a seed of its own, as many rollouts of one prompt are. What the
model computes, and the choice of tokens from its logits, is not counted.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from typing import Any

SUBMITS = 200
"""Submissions that are timed, each of which is closed again."""
PASSES = 30
"""Passes that are timed."""
COMPLETIONS = 8


def measure(model: Any, live: int, *, one_prompt: bool, size: int, tokens: int) -> dict[str, Any]:
    """Submissions per second, and milliseconds of bookkeeping in a pass, with `live` requests.

    `size` is that of a prompt, `tokens` that of a completion, both in tokens.
    """
    from sglang_qspec.link import Peer
    from sglang_qspec.messages import Close, SeededSampling, Submit

    # As a module that something is put into for a while.
    queue_drafter: Any = importlib.import_module("sglang_qspec.sidecar.drafter")

    passes, choose = Passes(model), queue_drafter.choose
    queue_drafter.choose = passes.timed(choose)
    drafter = queue_drafter.Drafter(passes, max_completion_tokens=tokens, apart=True)
    peer, numbers = Peer("bench", b""), itertools.count(1)

    def submit() -> int:
        number = next(numbers)
        # Prompts that differ do so from their first token on.
        first = 0 if one_prompt else number
        token_ids = [1000 + (first * 31 + place * 7) % 40_000 for place in range(size)]
        seeded = SeededSampling(number, 1.0)
        drafter.submit(
            peer,
            Submit(number, token_ids, 0, tokens, COMPLETIONS, 0.6, seeded=seeded),
        )
        drafter.take()
        return number

    for _ in range(live):
        submit()
    bookkeeping = []
    for _ in range(PASSES):
        began, passes.seconds = time.perf_counter(), 0.0
        drafter.step()
        drafter.take()
        bookkeeping.append(time.perf_counter() - began - passes.seconds)
        if drafter.idle:
            break
    began = time.perf_counter()
    for _ in range(SUBMITS):
        drafter.close(peer, Close(submit()))
    seconds = time.perf_counter() - began
    drafter.drop(peer)
    drafter.check_integrity()
    queue_drafter.choose = choose
    return {
        "live": live,
        "prompts": "one" if one_prompt else "different",
        "submits_per_s": SUBMITS / seconds,
        "bookkeeping_ms": statistics.median(bookkeeping) * 1e3,
    }


class Passes:
    """A draft model that adds up how long its passes take, and the choice of tokens in them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0
        self.step = self.timed(model.step)
        self.extend = self.timed(model.extend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def timed(self, function: Any) -> Any:
        """The function, adding up its seconds here."""

        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return run
