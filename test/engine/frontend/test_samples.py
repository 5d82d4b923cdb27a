"""Answers to one prompt have different seeds, and always the same ones."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.engine.frontend import samples


def manager(*, algorithm: str | None = "QSPEC", deterministic: bool = False) -> Any:
    args = {
        "speculative_algorithm": algorithm,
        "enable_deterministic_inference": deterministic,
    }
    return SimpleNamespace(server_args=SimpleNamespace(**args))


def spread(params: Any, of: Any = None, **prompts: Any) -> Any:
    """The sampling parameters after `samples.spread`."""
    obj = SimpleNamespace(**{"text": None, "input_ids": None, "sampling_params": params, **prompts})
    samples.spread(of or manager(), obj)
    return obj.sampling_params


@pytest.mark.parametrize(
    "prompts", [{"text": ["a", "b", "a", "a"]}, {"input_ids": [[1], [2], [1], [1]]}]
)
def test_only_equal_prompts_with_equal_seeds_get_other_seeds(prompts: dict[str, Any]) -> None:
    shared = {"sampling_seed": 7, "top_k": 3}
    seeds = [own["sampling_seed"] for own in spread(shared, **prompts)]
    assert seeds[:2] == [7, 7]
    assert len({7, *seeds[2:]}) == 3
    assert seeds == [own["sampling_seed"] for own in spread([shared] * 4, **prompts)]
    assert shared == {"sampling_seed": 7, "top_k": 3}
    own = [{"sampling_seed": number} for number in range(4)]
    assert spread(own, **prompts) == own


@pytest.mark.parametrize(
    "params", [None, {}, {"top_k": 3}, {"sampling_seed": "7"}, [{"sampling_seed": 7}], [1, 2]]
)
def test_other_parameters_stay_as_they_are(params: Any) -> None:
    assert spread(params, text=["a", "a"]) is params
    assert spread(params, text="a") is params


@pytest.mark.parametrize("prompt", [{"text": "aa"}, {"input_ids": [5, 6, 5, 5]}, {"input_ids": []}])
def test_a_single_prompt_keeps_its_parameters(prompt: dict[str, Any]) -> None:
    """Token ids that come twice are no equal prompts."""
    params = {"sampling_seed": 7}
    assert spread(params, **prompt) is params


def sent_seeds(of: Any, seed: int | None, number: int) -> list[int | None]:
    """The seeds that reach the scheduler for the samples of one prompt."""
    sent = []

    async def send(manager: Any, tokenized: Any) -> None:
        sent.append(tokenized.sampling_params.sampling_seed)

    async def send_all() -> None:
        params = SimpleNamespace(sampling_seed=seed)
        for _ in range(number):
            await samples.send_one(send, of, SimpleNamespace(sampling_params=params))

    asyncio.run(send_all())
    return sent


def test_each_sample_of_a_prompt_has_its_own_seed() -> None:
    seeds = sent_seeds(manager(), -5, 64)
    assert seeds[0] == -5
    assert len(set(seeds)) == 64
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    assert seeds == sent_seeds(manager(), -5, 64)
    assert sent_seeds(manager(), None, 3) == [None] * 3


@pytest.mark.parametrize("of", [manager(algorithm=None), manager(deterministic=True)])
def test_without_qspec_and_with_deterministic_inference_seeds_mean_what_they_say(of: Any) -> None:
    shared = {"sampling_seed": 7}
    assert spread(shared, of, text=["a", "a"]) is shared
    assert sent_seeds(of, 7, 3) == [7, 7, 7]
