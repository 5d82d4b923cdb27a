"""Greedy passes without drafts get the tokens of SGLang's own sampler."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.sampler import Sampler

from sglang_qspec.engine.passes.sample import greedy
from sglang_qspec.verify.likeliest import likeliest
from test.engine.passes import toy
from test.engine.passes.toy import Batch, Request

COUNT = 40


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """The logits from which tokens are chosen without SGLang's own code."""
    logits: list[torch.Tensor] = []

    def noted(rows: torch.Tensor) -> torch.Tensor:
        logits.append(rows)
        return likeliest(rows)

    monkeypatch.setattr(Sampler, "forward", greedy._forward_without)
    monkeypatch.setattr(greedy, "likeliest", noted)
    with toy.engine():
        yield logits


def tokens(params: dict[str, Any]) -> list[int]:
    """One token for each of COUNT requests. Their logits have ties."""
    batch = Batch([Request(params, number) for number in range(COUNT)])
    logits = torch.randint(0, 3, (COUNT, toy.VOCAB), generator=torch.Generator().manual_seed(1))
    output: Any = SimpleNamespace(next_token_logits=logits.float())
    with batch.forward():
        found: torch.Tensor = Sampler()(output, batch.sampling_info, False, [], [], batch.seq_lens)
    return found.tolist()


def test_the_tokens_are_those_of_sglang(chosen: list[torch.Tensor]) -> None:
    expected = tokens({"temperature": 0.0})
    assert not chosen
    greedy.install()
    assert tokens({"temperature": 0.0}) == expected
    assert len(chosen) == 1


def test_sampled_requests_keep_sglangs_sampler(chosen: list[torch.Tensor]) -> None:
    greedy.install()
    assert len(set(tokens({"temperature": 5.0}))) > 1
    assert not chosen


@pytest.mark.parametrize("wants", ["logprobs", "watermark", "mask"])
def test_a_pass_that_returns_more_than_tokens_keeps_sglangs_sampler(
    wants: str, monkeypatch: pytest.MonkeyPatch, chosen: list[torch.Tensor]
) -> None:
    given: list[Any] = []

    def stock(sampler: Sampler, *arguments: Any, **more: Any) -> str:
        given.append((arguments, more))
        return "stock"

    monkeypatch.setattr(greedy, "_forward_without", stock)
    greedy.install()
    batch = Batch([Request({"temperature": 0.0}, 0)])
    if wants == "mask":
        batch.sampling_info.sampling_mask_batch_indices = torch.tensor([0])
    logits = toy.LOGITS[:1]
    output: Any = SimpleNamespace(next_token_logits=logits)
    arguments: tuple[Any, ...] = (
        output,
        batch.sampling_info,
        wants == "logprobs",
        [],
        [],
        batch.seq_lens,
    )
    marked = {"logprob_logits": logits if wants == "watermark" else None}
    found: Any = Sampler()(*arguments, **marked)
    assert found == "stock"
    assert given == [(arguments, marked)]
    assert not chosen
