"""Gives each answer to one prompt its own sampling seed, so that answers with a seed differ.

The first answer has the seed of the request. With `--enable-deterministic-inference` SGLang's own
meaning holds: equal prompts with equal seeds get equal answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang_qspec import config
from sglang_qspec.engine.frontend import fields
from sglang_qspec.seeds import derived_seed


def spread(manager: Any, obj: Any) -> None:
    """Change the seeds of equal prompts with equal seeds in a `GenerateReqInput`."""
    params = getattr(obj, "sampling_params", None)
    if not _derives(manager) or not params or not fields.is_batch(obj):
        return
    prompts = fields.prompts_of(obj)
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts) or not all(isinstance(own, dict) for own in each):
        return  # SGLang refuses it
    met: Counter[tuple[str, int]] = Counter()
    spread = []
    for prompt, own in zip(prompts, each, strict=True):
        seed = own.get("sampling_seed")
        if isinstance(seed, int):
            key = str(prompt), seed
            # The samples of the first of these prompts take number 1.
            own = {**own, "sampling_seed": derived_seed(seed, met[key] + 1)} if met[key] else own
            met[key] += 1
        spread.append(own)
    if any(met[key] > 1 for key in met):
        obj.sampling_params = spread


async def send_one(send: Callable[..., Any], manager: Any, tokenized_obj: Any) -> None:
    """Around `TokenizerManager._send_one_request`, which `n` calls once for each sample.

    The samples of a prompt share one object with the sampling parameters.
    """
    await send(manager, tokenized_obj)
    params = tokenized_obj.sampling_params
    if params.sampling_seed is not None and _derives(manager):
        params.sampling_seed = derived_seed(params.sampling_seed, 1)


def _derives(manager: Any) -> bool:
    return (
        config.is_qspec(manager.server_args)
        and not manager.server_args.enable_deterministic_inference
    )
