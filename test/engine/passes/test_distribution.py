"""Texts from verified drafts have exactly the target's distribution, whatever was drafted.

The tests run real passes over a toy target (`toy`). Pearson's chi-square compares the counts of the
first one, two and three tokens of many requests with their computed distribution. Each comparison
prints its statistic (`pytest -rP`) and records it as a property in a junit file. Seeds are fixed,
so runs repeat. docs/losslessness.md has the results of one run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
from torch import Tensor

from sglang_qspec.engine.passes.sample.seeds import draws_of
from sglang_qspec.verify import rows
from sglang_qspec.verify.penalties import BatchPenalties, penalize
from sglang_qspec.verify.rejection import Proposals, sample_near
from test.engine.passes import toy
from test.engine.passes.toy import Case, decode_with_sglang, distribution, speculate
from test.verify.chi_square import Fit, fit

LEVEL = 1e-5
"""Smallest p-value that passes. The thorough run has some hundred comparisons; a right build fails
them with less than one seed in a hundred."""
SAMPLES = {False: 20_000, True: 5_000}
MANY_SAMPLES = {False: 100_000, True: 40_000}
"""Number of texts; fewer if there are penalties, which the code computes request by request."""

ALL_AT_ONCE = {"min_p": 1e-6}
"""Drops no token, but the sampler draws filtered rows all at once, and others in one race each."""
PENALTIES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 1.2},
    "repetition": {"repetition_penalty": 1.8},
    "min_new_tokens": {"min_new_tokens": 3},
    "all penalties": {
        "frequency_penalty": -0.5,
        "presence_penalty": 0.8,
        "repetition_penalty": 1.4,
        "min_new_tokens": 2,
    },
}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "all filters": {"top_k": 5, "top_p": 0.95, "min_p": 0.05},
    "logit bias": {"logit_bias": {"2": 1.5, "4": -2.0}},
}
PARAMETERS = FILTERS | PENALTIES
TEMPERATURES = (0.5, 1.0, 1.5)


def params_of(temperature: float, name: str) -> dict[str, Any]:
    return {"temperature": temperature, **ALL_AT_ONCE, **PARAMETERS[name]}


def case_of(temperature: float, name: str, drafter: str, shape: str, accept: str) -> Case:
    return Case(params_of(temperature, name), drafter, shape, accept == "reject")


@pytest.fixture(autouse=True)
def engine(pytestconfig: pytest.Config) -> Iterator[None]:
    with toy.engine(pytestconfig.getoption("--device")):
        yield


def fits(counts: Tensor, params: dict[str, Any]) -> list[Fit]:
    """The fits of the first one, two and three tokens."""
    shape = (toy.VOCAB,) * toy.LENGTH
    counts, expected = counts.view(shape), distribution(params).view(shape)
    return [
        fit(counts.flatten(length).sum(-1).flatten(), expected.flatten(length).sum(-1).flatten())
        if length < toy.LENGTH
        else fit(counts.flatten(), expected.flatten())
        for length in range(1, toy.LENGTH + 1)
    ]


def check(counts: Tensor, params: dict[str, Any], record: Callable[[str, object], None]) -> None:
    """Fail if the counts of a length do not fit the target's distribution."""
    found = fits(counts, params)
    for length, one in enumerate(found, 1):
        line = f"chi2={one.statistic:.1f} df={one.freedom} p={one.p:.3g} n={int(counts.sum())}"
        record(f"{length} tokens", line)
        print(f"{length} tokens: {line}")  # noqa: T201 (for -rP)
    assert min(one.p for one in found) > LEVEL


@pytest.mark.parametrize("name", ["none", "all filters", "logit bias", "all penalties"])
def test_sglangs_own_plain_passes_have_the_computed_distribution(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """SGLang's penalizers and sampler alone: this validates the computed distribution."""
    params = {"temperature": 1.0, **PARAMETERS[name]}
    check(decode_with_sglang(params, 40_000), params, record_property)


@pytest.mark.parametrize(
    ("temperature", "name", "drafter", "shape", "accept"),
    [
        (1.0, "none", "good", "tree", "match"),
        (1.5, "none", "adversarial", "chain", "match"),
        (0.5, "logit bias", "good", "tree", "reject"),
        (1.0, "none", "bad", "tree", "reject"),
        (1.5, "all filters", "good", "chain", "reject"),
        (1.0, "top-p", "adversarial", "tree", "match"),
        (1.0, "all penalties", "good", "tree", "match"),
        (1.5, "all penalties", "bad", "tree", "reject"),
        (0.5, "min_new_tokens", "good", "chain", "match"),
    ],
)
def test_texts_have_the_targets_distribution(
    temperature: float,
    name: str,
    drafter: str,
    shape: str,
    accept: str,
    record_property: Callable[[str, object], None],
) -> None:
    case = case_of(temperature, name, drafter, shape, accept)
    check(speculate(case, SAMPLES[name in PENALTIES]), case.params, record_property)


@pytest.mark.parametrize(
    ("name", "drafter", "accept"),
    [
        ("all penalties", "good", "match"),
        ("all filters", "bad", "reject"),
    ],
)
def test_texts_of_ragged_passes_have_the_targets_distribution(
    name: str, drafter: str, accept: str, record_property: Callable[[str, object], None]
) -> None:
    case = replace(case_of(1.0, name, drafter, "tree", accept), ragged=True)
    check(speculate(case, SAMPLES[name in PENALTIES]), case.params, record_property)


@pytest.mark.parametrize(
    ("name", "drafter", "accept"),
    [
        ("top-p", "adversarial", "match"),
        ("all filters", "good", "reject"),
        ("all penalties", "bad", "reject"),
    ],
)
def test_texts_that_are_sampled_as_on_a_gpu_have_the_targets_distribution(
    name: str,
    drafter: str,
    accept: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Sampling computes all rows and all branches alike."""
    monkeypatch.setattr(rows, "picks", lambda _mask: False)
    case = case_of(1.0, name, drafter, "tree", accept)
    check(speculate(case, SAMPLES[True]), case.params, record_property)


@pytest.mark.parametrize("accept", ["match", "reject"])
def test_texts_that_are_drawn_in_races_have_the_targets_distribution(
    accept: str, record_property: Callable[[str, object], None]
) -> None:
    case = Case({"temperature": 1.0}, "good", "tree", accept == "reject")
    check(speculate(case, 5000), case.params, record_property)


@pytest.mark.thorough
@pytest.mark.parametrize("accept", ["match", "reject"])
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_texts_have_the_targets_distribution_for_all_parameters(
    temperature: float, name: str, accept: str, record_property: Callable[[str, object], None]
) -> None:
    case = case_of(temperature, name, "good", "tree", accept)
    check(speculate(case, MANY_SAMPLES[name in PENALTIES]), case.params, record_property)


@pytest.mark.thorough
@pytest.mark.parametrize("accept", ["match", "reject"])
@pytest.mark.parametrize("name", ["none", "all penalties"])
@pytest.mark.parametrize(("drafter", "shape"), list(itertools.product(toy.DRAFTERS, toy.SHAPES)))
def test_texts_have_the_targets_distribution_for_all_drafts(
    drafter: str, shape: str, name: str, accept: str, record_property: Callable[[str, object], None]
) -> None:
    case = case_of(1.0, name, drafter, shape, accept)
    check(speculate(case, MANY_SAMPLES[name in PENALTIES]), case.params, record_property)


# The same check, with a rule broken on purpose.


def twice_as_ready(probs: Tensor, proposals: Proposals) -> Tensor:
    """A draft is kept with twice its probability."""
    return sample_near(probs, proposals._replace(candidate_probs=proposals.candidate_probs / 2))


def always_ready(probs: Tensor, proposals: Proposals) -> Tensor:
    """Every draft is kept."""
    drawn = sample_near(probs, proposals)
    return torch.where(proposals.known, proposals.token_ids, drawn)


def nothing_taken_off(probs: Tensor, ids: Tensor, offers: Tensor) -> Tensor:
    """After a rejected draft, the token is drawn from the target's whole distribution."""
    return probs


def first_child_wins(**arguments: Any) -> None:
    """The first child is accepted whatever token the target has drawn."""
    child = arguments["retrieve_next_token"]
    drafted = arguments["candidates"].gather(1, child.clamp(min=0))
    arguments["target_predict"] = torch.where(child < 0, arguments["target_predict"], drafted)
    verify_tree_greedy_func(**arguments)


def root_alone(
    logits: Tensor, penalties: BatchPenalties, token_ids: Tensor, mask: Tensor, rows: Tensor
) -> None:
    """All nodes have the root's penalties, as in SGLang's trees."""
    path = mask.clone()
    path[:, :, 1:] = False
    penalize(logits, penalties, token_ids, path, rows)


def seeds_of_the_root(info: Any, positions: Tensor, owners: Tensor) -> Any:
    """All nodes of a tree are drawn with the noise of its root."""
    return draws_of(info, positions[torch.searchsorted(owners, owners)], owners)


@pytest.mark.parametrize(
    ("place", "broken", "accept"),
    [
        ("verify.sample.sample_near", twice_as_ready, "reject"),
        ("verify.sample.sample_near", always_ready, "reject"),
        ("verify.rejection._left_over", nothing_taken_off, "reject"),
        ("engine.passes.sample.sample.verify_tree_greedy_func", first_child_wins, "match"),
        ("engine.passes.sample.sample.draws_of", seeds_of_the_root, "match"),
        ("engine.passes.sample.penalties.penalize", root_alone, "match"),
        ("engine.passes.sample.penalties.penalize", root_alone, "reject"),
    ],
)
def test_the_check_fails_if_a_rule_is_broken(
    monkeypatch: pytest.MonkeyPatch, place: str, broken: Callable[..., Any], accept: str
) -> None:
    name = "all penalties" if broken is root_alone else "none"
    case = case_of(1.0, name, "good", "tree", accept)
    monkeypatch.setattr(f"sglang_qspec.{place}", broken)
    assert min(one.p for one in fits(speculate(case, 3000), case.params)) < LEVEL / 1000
