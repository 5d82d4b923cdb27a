"""Sampling parameters and inputs decide which batches get drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.passes.decide.proposer import Proposer
from sglang_qspec.engine.passes.launch import decode
from sglang_qspec.policy import PassTimes, PipelinePlan
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from test.engine.speculating import enqueue, make

PENALIZED = {"acc_additive_penalties": object()}


def batch_of(params: dict[str, Any], **info: Any) -> Any:
    """The part of SGLang's batch that a proposer reads."""
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


def drafted(batch: Any) -> int:
    """Number of draft tokens that a pass over `batch` has; the prompt of its request repeats."""
    active = make(None)
    enqueue(active, prompt_ids=[7, 8, 9] * 5, max_new_tokens=100)
    runtime_settings = RuntimeSettings.of(QSpecConfig(), 8)
    proposer = Proposer(active, runtime_settings, PassTimes())
    return int(decode.propose(proposer, active, batch, PipelinePlan("ahead", 8)).trees.sizes[0]) - 1


PLAIN: dict[str, Any] = {"temperature": 1.0}


@pytest.mark.parametrize(
    ("params", "info"),
    [
        ({"temperature": 0}, {}),
        (PLAIN, {}),
        ({**PLAIN, "top_k": 5}, {}),
        ({**PLAIN, "top_p": 0.9}, {}),
        ({**PLAIN, "min_p": 0.1}, {}),
        ({**PLAIN, "top_k": 5, "top_p": 0.9}, {}),
        (PLAIN, PENALIZED),
        (PLAIN, {"has_custom_logit_processor": True}),
    ],
)
def test_all_sampling_parameters_get_drafts(params: dict[str, Any], info: dict[str, Any]) -> None:
    assert drafted(batch_of(params, **info)) > 0


def test_a_batch_with_watermarks_gets_no_drafts() -> None:
    assert drafted(batch_of(PLAIN, has_watermark_candidates=True)) == 0


def test_a_batch_with_an_image_gets_no_drafts() -> None:
    batch = batch_of(PLAIN)
    batch.reqs.append(SimpleNamespace(rid="b", output_ids=[5], multimodal_inputs=object()))
    assert drafted(batch) == 0
