"""Which batches get drafts, by sampling parameters and inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.passes.proposer import Proposer
from sglang_qspec.engine.requests.runtime_settings import RuntimeSettings
from sglang_qspec.policy import PassTimes, PipelinePlan
from test.engine.speculating import enqueue, make

PENALIZED = {"acc_additive_penalties": object()}


def batch_of(params: dict[str, Any], **info: Any) -> Any:
    """All that a proposer reads of SGLang's batch."""
    sampling = SamplingParams(**params)
    sampling.normalize(None)
    req = SimpleNamespace(rid="a", output_ids=[8], sampling_params=sampling, multimodal_inputs=None)
    flags = {
        "has_custom_logit_processor": False,
        "has_watermark_candidates": False,
        "need_min_p_sampling": sampling.min_p > 0,
        "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
    }
    return SimpleNamespace(reqs=[req], sampling_info=SimpleNamespace(**flags | info))


def drafted(batch: Any, *, on_cpu: bool) -> int:
    """Number of draft tokens that a pass over `batch` has; the prompt of its request repeats."""
    active = make(None)
    enqueue(active, prompt_ids=[7, 8, 9] * 5, max_new_tokens=100)
    runtime_settings = RuntimeSettings.of(QSpecConfig(), 8, graphs=False)
    proposer = Proposer(active, runtime_settings, PassTimes(), on_cpu=on_cpu)
    return int(proposer.propose(batch, PipelinePlan("ahead", 8)).trees.sizes[0]) - 1


PLAIN: dict[str, Any] = {"temperature": 1.0}


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, PLAIN, {**PLAIN, "top_k": 5}, {**PLAIN, "top_p": 0.9}]
)
def test_parameters_that_tree_verification_keeps_exact_get_drafts(
    params: dict[str, Any], on_cpu: bool
) -> None:
    assert drafted(batch_of(params), on_cpu=on_cpu) > 0


@pytest.mark.parametrize(
    ("params", "info"),
    [
        (PLAIN, PENALIZED),
        ({**PLAIN, "min_p": 0.1}, {}),
        ({**PLAIN, "top_k": 5, "top_p": 0.9}, {}),
        (PLAIN, {"has_custom_logit_processor": True}),
    ],
)
def test_parameters_that_sglangs_trees_treat_inexactly_get_drafts_only_on_a_cpu(
    params: dict[str, Any], info: dict[str, Any]
) -> None:
    assert drafted(batch_of(params, **info), on_cpu=True) > 0
    assert drafted(batch_of(params, **info), on_cpu=False) == 0


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_batch_with_watermarks_gets_no_drafts(on_cpu: bool) -> None:
    assert drafted(batch_of(PLAIN, has_watermark_candidates=True), on_cpu=on_cpu) == 0


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_batch_with_an_image_gets_no_drafts(on_cpu: bool) -> None:
    batch = batch_of(PLAIN)
    batch.reqs.append(SimpleNamespace(rid="b", output_ids=[5], multimodal_inputs=object()))
    assert drafted(batch, on_cpu=on_cpu) == 0
