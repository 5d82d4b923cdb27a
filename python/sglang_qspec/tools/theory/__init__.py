"""Formulas for the expected tokens and the time of a pass, and for the fastest pipeline.

docs/theory.md has the formulas, their assumptions and what they leave out. The server's policies
use those of `policy.pipelines`. Times are seconds. These symbols have the same meaning everywhere:

alpha    probability that the target's next token is the drafter's, if all tokens before it were
k        maximum number of draft tokens that a pass verifies for a request; its width is k + 1
b        requests in flight
V(b, w)  seconds in which the target verifies w tokens for each of b requests
D(b)     seconds in which the drafter drafts k tokens for each of b requests; d = D / k is a step
"""
