"""Expected tokens, seconds and tokens per second of each pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from sglang_qspec.config import PIPELINES
from sglang_qspec.errors import TheoryError
from sglang_qspec.policy.acceptance import expected_tokens, hit_share, queue_tokens
from sglang_qspec.policy.ahead import ahead

VerifySeconds = Callable[[int, int], float]
"""V(b, w): seconds of a pass over w tokens for each of b requests."""
DraftSeconds = Callable[[int], float]
"""D(b): seconds of drafting k tokens for each of b requests."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The yield of a pipeline in a round, in which each request has one pass."""

    requests: int
    tokens: float
    """Expected tokens of one request in a round."""
    seconds: float
    """Seconds from the start of a round to the start of the next."""

    @property
    def rate(self) -> float:
        """Tokens per second, of all requests."""
        return self.requests * self.tokens / self.seconds


def estimates(
    alpha: float,
    k: int,
    b: int,
    verify_seconds: VerifySeconds,
    draft_seconds: DraftSeconds,
    *,
    lookahead: int | None = None,
    again: float | None = None,
    overhead: float = 0.0,
) -> dict[str, Estimate]:
    """The pipelines none, sequential, halves and ahead, for b requests in flight.

    `lookahead` is the maximum length of an `ahead` draft after the committed tokens. The default is
    2k + 1: the drafts of two passes and the target's own token. With `again`, the result includes
    `queue`; `again` is the probability that a text without a matching draft matches one at the next
    pass. `overhead` is the seconds of a round besides verifying and waiting.
    """
    _check(alpha, k, b, lookahead, again)
    verify, draft = verify_seconds(b, k + 1), draft_seconds(b)
    plain = verify_seconds(b, 1)
    tokens = expected_tokens(alpha, k)
    found = {
        "none": Estimate(b, 1.0, plain + overhead),
        "sequential": Estimate(b, tokens, verify + draft + overhead),
        "halves": Estimate(b, tokens, overhead + _halves(k, b, verify_seconds, draft_seconds)),
        "ahead": _ahead(alpha, k, b, verify + overhead, draft, lookahead or 2 * k + 1),
    }
    if again is not None:
        drafted = 1.0 - (1.0 - hit_share(alpha, k, again)) ** b  # in a pass, for any request
        seconds = drafted * verify + (1.0 - drafted) * plain + overhead
        found["queue"] = Estimate(b, queue_tokens(alpha, k, again), seconds)
    return found


def fastest(
    alpha: Callable[[int], float],
    widths: Iterable[int],
    b: int,
    verify_seconds: VerifySeconds,
    step_seconds: Callable[[int], float],
    *,
    lookahead: int,
) -> dict[str, tuple[float, int]]:
    """Tokens per second of each of PIPELINES at its best width for b requests, and this width.

    `alpha` gives alpha by k, and `step_seconds` the seconds of a draft step by the number of
    requests. A width takes a fraction of a millisecond, so a server can compare several between
    passes.
    """
    best = dict.fromkeys(PIPELINES, (0.0, 1))
    for width in widths:
        k = width - 1
        drafts = partial(_draft_seconds, k, step_seconds)
        found = estimates(alpha(k), k, b, verify_seconds, drafts, lookahead=max(lookahead, k))
        for pipeline in PIPELINES:
            best[pipeline] = max(best[pipeline], (found[pipeline].rate, width))
    return best


def _draft_seconds(k: int, step_seconds: Callable[[int], float], b: int) -> float:
    return k * step_seconds(b)


def _halves(k: int, b: int, verify_seconds: VerifySeconds, draft_seconds: DraftSeconds) -> float:
    """Seconds of a round: each half is verified while the drafter drafts for the other half.

    A single request has no halves, so drafting and verifying take turns.
    """
    small = b // 2
    large = b - small
    if small == 0:
        return verify_seconds(b, k + 1) + draft_seconds(b)
    verify, draft = verify_seconds(large, k + 1), draft_seconds(large)
    if small == large:
        return 2 * max(verify, draft)
    return max(verify, draft_seconds(small)) + max(verify_seconds(small, k + 1), draft)


def _ahead(alpha: float, k: int, b: int, verify: float, draft: float, lookahead: int) -> Estimate:
    if k == 0:
        return Estimate(b, 1.0, verify)
    tokens, seconds = ahead(alpha, k, b, verify, draft / k, max(lookahead, k))
    return Estimate(b, tokens, seconds)


def _check(alpha: float, k: int, b: int, lookahead: int | None, again: float | None) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise TheoryError(f"alpha is {alpha}, but must be from 0 to 1")
    if k < 0:
        raise TheoryError(f"k is {k}, but must be at least 0")
    if b < 1:
        raise TheoryError(f"the number of requests is {b}, but must be at least 1")
    if lookahead is not None and lookahead < max(k, 1):
        raise TheoryError(f"lookahead is {lookahead}, but must be at least k, which is {k}")
    if again is not None and not 0.0 <= again <= 1.0:
        raise TheoryError(f"again is {again}, but must be from 0 to 1")
