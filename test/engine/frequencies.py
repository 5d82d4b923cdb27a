"""Tests whether a server's sampled texts have one distribution with and without speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from benchmark.harness.server import Server
from test.verify.chi_square import compare

TEXT = "The old house at the end of the road was"
TOKENS = 4
"""Length of each text. Its first token comes from prefill, the others from verified trees."""
LEVEL = 1e-5
"""Smallest p-value that passes. The server's seeds are random, so runs differ."""
SAMPLED = {"temperature": 1.2, "top_k": 3}
"""Parameters with a distribution that few samples show."""
SAMPLES = 320
"""Number of samples with these parameters."""
PARAMETERS: dict[str, dict[str, Any]] = {
    "top-p": {"temperature": 0.5, "top_p": 0.9},
    "repetition": {"temperature": 0.5, "repetition_penalty": 1.5},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "top-k": {"temperature": 1.5, "top_k": 4},
    "top-k, presence": {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "presence_penalty": 1.0},
    "min-p, frequency": {"temperature": 1.5, "min_p": 0.3, "frequency_penalty": 0.8},
    "bias": {"temperature": 1.0, "top_k": 5, "logit_bias": {"253": 2.0, "28": -2.0}},
}


def sample(
    server: Server, params: dict[str, Any], custom: dict[str, Any], count: int, **body: Any
) -> list[dict[str, Any]]:
    """`count` answers to one prompt. `body` are further fields of the requests."""
    # The test's own limit ends a wait that is too long.
    sampling = {**params, "max_new_tokens": TOKENS, "ignore_eos": True, "custom_params": custom}
    asked = {"text": [TEXT] * count, "sampling_params": sampling, **body}
    answers: list[dict[str, Any]] = server.post("/generate", asked, timeout=3600.0)
    return answers


def check_first_tokens(
    server: Server, params: dict[str, Any], custom: dict[str, Any], count: int
) -> None:
    """Fail if texts with speculation have another distribution than texts without.

    `custom` are options for the drafts.
    """
    ours = sample(server, params, custom, count)
    check_equally_frequent(ours, sample(server, params, {"qspec_enabled": False}, count))


def check_equally_frequent(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Fail if answers with drafts have another distribution than answers of the target alone.

    Compares the first token, the first two, and so on.
    """
    accepted = sum(answer["meta_info"]["qspec"]["accepted_tokens"] for answer in ours)
    assert accepted > len(ours) / 4  # otherwise this would test plain decoding
    found = [
        compare(count_starts(ours, length), count_starts(theirs, length))
        for length in range(1, TOKENS + 1)
    ]
    for length, one in enumerate(found, 1):
        line = f"chi2={one.statistic:.1f} df={one.freedom} p={one.p:.3g} n={len(ours)}"
        print(f"{length} tokens: {line}")  # noqa: T201 (for -rP)
    assert max(one.freedom for one in found) > 3
    assert min(one.p for one in found) > LEVEL


def count_starts(answers: list[dict[str, Any]], length: int) -> Counter[Hashable]:
    return Counter(tuple(answer["output_ids"][:length]) for answer in answers)
