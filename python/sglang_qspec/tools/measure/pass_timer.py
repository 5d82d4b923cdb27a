"""Asks a QSPEC server for answers, and measures its passes.

The runtime settings give each pass one width, with padding for missing drafts. So the times are
those of real verify passes, host work included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.measure.model_process import Answer

PASSES = 12
"""Number of passes of a measurement that are timed."""
REPEATS = 3
"""Measurements of each kind of pass; the fastest counts, as the least disturbed one."""
SAMPLING_SEED = 1000
"""Sampling seed of the first sampled answer; the next ones follow."""


class PassTimer:
    """Measures the server of `client`, which should serve nothing else meanwhile."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def answers(
        self, prompts: Sequence[list[int]], tokens: int, temperature: float | None
    ) -> list[Answer]:
        """An answer of at most `tokens` tokens to each prompt; greedy if `temperature` is None."""
        self.set(draft_token_num=1, fixed_width=1)
        seeds = [None if temperature is None else SAMPLING_SEED + i for i in range(len(prompts))]
        params = [
            {"temperature": 0.0, "max_new_tokens": tokens}
            if seed is None
            else {"temperature": temperature, "sampling_seed": seed, "max_new_tokens": tokens}
            for seed in seeds
        ]
        body = {"input_ids": list(prompts), "sampling_params": params}
        found = self._client.post("/generate", body)
        return [
            Answer(prompt, each["output_ids"], seed)
            for prompt, each, seed in zip(prompts, found, seeds, strict=True)
        ]

    def pass_seconds(
        self,
        prompts: Sequence[list[int]],
        cells: Sequence[tuple[int, int]],
        tick: Callable[[], object] = lambda: None,
    ) -> dict[tuple[int, int], float]:
        """Seconds of a pass over a number of requests with a width, by both, host work included.

        The `cells` take turns, so that a load peak does not hit all measurements of a cell. `tick`
        is called after each measurement, REPEATS times for each cell.
        """
        found: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
        for _ in range(REPEATS):
            for cell, seconds in found.items():
                seconds.append(self._mean_pass(prompts, *cell))
                tick()
        return {cell: min(seconds) for cell, seconds in found.items()}

    def _mean_pass(self, prompts: Sequence[list[int]], requests: int, width: int) -> float:
        """Mean seconds of the passes that serve a number of prompts, after a moment of them."""
        self.set(draft_token_num=width, fixed_width=1)
        texts = in_turn(prompts, requests)
        self.generate(texts, 2)
        before = self.counters()
        self.generate(texts, PASSES)
        passes, seconds = (now - then for now, then in zip(self.counters(), before, strict=True))
        return seconds / max(1.0, passes)

    def generate(self, texts: Sequence[list[int]], tokens: int) -> None:
        """Serve the texts at once, each with an answer of this number of tokens."""
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
        self._client.post("/generate", {"input_ids": list(texts), "sampling_params": params})

    def counters(self) -> tuple[float, float]:
        """Number and seconds of all decode passes so far."""
        pipelines: Any = self._client.state()["pipelines"].values()
        passes = sum(each["passes"] for each in pipelines)
        return passes, sum(each["seconds"] for each in pipelines)

    def set(self, **settings: int) -> None:
        """Change runtime settings. Raises QSpecError if the server refuses them."""
        body = {f"qspec_{name}": value for name, value in settings.items()}
        if self._client.post("/set_internal_state", {"server_args": body}) != [True]:
            raise QSpecError(f"the target's server refused {body}")


def in_turn(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """This number of prompts, one after another and then again from the first."""
    return list(itertools.islice(itertools.cycle(prompts), count))
