"""Asks a QSPEC server for answers, and measures its passes.

The runtime settings give each pass one width, with padding for missing drafts. So the times are
those of real verify passes, host work included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.compare.answers import Answer
from sglang_qspec.tools.complete.client import Client

PASSES = 12
"""Number of passes of a measurement that are timed."""
REPEATS = 2
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

    def pass_seconds(self, prompts: Sequence[list[int]], requests: int, width: int) -> float:
        """Seconds of a pass over `requests` with `width` tokens of each, host work included."""
        texts = self._warm(prompts, requests, width)
        return min(self._mean_pass(texts) for _ in range(REPEATS))

    def _warm(self, prompts: Sequence[list[int]], requests: int, width: int) -> list[list[int]]:
        """Set the width, and serve that many prompts, which are returned, for a moment."""
        self.set(draft_token_num=width, fixed_width=1)
        texts = list(itertools.islice(itertools.cycle(prompts), requests))
        self._generate(texts, 2)
        return texts

    def _mean_pass(self, texts: list[list[int]]) -> float:
        """Mean seconds of the passes that serve the texts."""
        before = self.counters()
        self._generate(texts, PASSES)
        passes, seconds = (now - then for now, then in zip(self.counters(), before, strict=True))
        return seconds / max(1.0, passes)

    def _generate(self, texts: list[list[int]], tokens: int) -> None:
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
        self._client.post("/generate", {"input_ids": texts, "sampling_params": params})

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
