"""Tests whether two samples of short texts have one distribution."""

import math
from collections import Counter
from typing import Any

SAMPLED = {"temperature": 1.2, "top_k": 3, "max_new_tokens": 4, "ignore_eos": True}

SAMPLED_TEXTS = ["The old house at the end of the road was"] * 250


def check_equally_frequent(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Fail if two samples of the same size have different distributions."""
    ours = Counter(tuple(answer["output_ids"]) for answer in answers)
    theirs = Counter(tuple(answer["output_ids"]) for answer in others)
    common = [text for text, count in (ours + theirs).items() if count >= 10]
    pairs = [(ours[text], theirs[text]) for text in common]
    pairs.append(tuple(len(answers) - sum(column) for column in zip(*pairs, strict=True)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    freedom = len(pairs) - 1
    assert freedom > 5
    # Five standard deviations above the mean: a right build fails in under one run of 10,000.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
