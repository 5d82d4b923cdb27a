"""Formulas for the expected tokens and the time of a pass, and for the fastest pipeline.

docs/theory.md has the formulas, their assumptions and what they leave out. Times are seconds. These
symbols have the same meaning everywhere:

alpha    probability that the target's next token is the drafter's, if all tokens before it were
k        maximum number of draft tokens that a pass verifies for a request; its width is k + 1
b        requests in flight
V(b, w)  seconds in which the target verifies w tokens for each of b requests
D(b)     seconds in which the drafter drafts k tokens for each of b requests; d = D / k is a step
"""

from sglang_qspec.theory.acceptance import agreement, expected_tokens, queue_tokens
from sglang_qspec.theory.bounds import Halving, bound, halves_over_sequential, sd_over_psd
from sglang_qspec.theory.curve import Curve
from sglang_qspec.theory.fit import Comparison, Fit, compare, fit
from sglang_qspec.theory.pipelines import Estimate, estimates, rates
from sglang_qspec.theory.rows import Row, read_rows

__all__ = [
    "Comparison",
    "Curve",
    "Estimate",
    "Fit",
    "Halving",
    "Row",
    "agreement",
    "bound",
    "compare",
    "estimates",
    "expected_tokens",
    "fit",
    "halves_over_sequential",
    "queue_tokens",
    "rates",
    "read_rows",
    "sd_over_psd",
]
