"""The default backends of a CPU server, and the CPUs and the idle state of its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_qspec import config
from sglang_qspec.engine.boundary.refusal import refuse
from sglang_qspec.engine.cpu import lora, ranks
from sglang_qspec.engine.cpu.attention import NAME
from sglang_qspec.engine.placement import core_division, environment
from sglang_qspec.errors import ConfigError
from sglang_qspec.values import parse_cores

NAMED = ("GptOssForCausalLM", "Exaone4ForCausalLM", "Gemma4ForConditionalGeneration")
"""Architectures for which SGLang refuses attention backends that it does not list by name."""
LISTED = "triton"
"""A backend that SGLang lists for all of them."""


@cache
def register() -> None:
    """Make `qspec_cpu` the default for attention and `torch_native` for LoRA; give each rank CPUs.

    Several ranks sleep while they are idle, because each would take a whole CPU of this machine.
    Repeated calls change nothing.
    """
    register_resolution_hook("handle_cpu_backends")(_choose)
    register_resolution_hook("handle_model_specific_adjustments")(_adjust)


def _choose(server_args: Any, previous: Callable[[Any], None]) -> None:
    view = resolving_view(server_args)
    unset = view.device == "cpu" and view.attention_backend is None
    previous(server_args)
    if unset:
        declare_resolution(server_args, "sglang_qspec.engine.cpu", attention_backend=NAME)
    if view.device == "cpu" and view.lora_backend == lora.GPU_DEFAULT:
        declare_resolution(server_args, "sglang_qspec.engine.cpu", lora_backend=lora.NAME)
    environment.place_ranks(())
    ranks_here = view.tp_size * view.dp_size * view.pp_size
    if view.device == "cpu" and ranks_here > 1:
        declare_resolution(server_args, "sglang_qspec.engine.cpu", sleep_on_idle=True)
        try:
            _place(view, ranks_here)
        except ConfigError as error:
            refuse(error)


def _adjust(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Run SGLang's adjustments for the model, without its check of the attention backend's name.

    The check keeps backends without windows and sinks from these models. `qspec_cpu` has both.
    """
    view = resolving_view(server_args)
    named = view.attention_backend == NAME and any(
        name in NAMED for name in model_config_of(server_args).hf_config.architectures or ()
    )
    if named:
        declare_resolution(server_args, "sglang_qspec.engine.cpu", attention_backend=LISTED)
    previous(server_args)
    if named:
        declare_resolution(server_args, "sglang_qspec.engine.cpu", attention_backend=NAME)


def _place(view: Any, ranks_here: int) -> None:
    """Give each of several ranks CPUs of its own, and leave some to a sidecar of the server."""
    pinned: frozenset[int] = frozenset()
    drafts = False
    if config.is_qspec(view):
        pinned = parse_cores(core_division.pinned_cpus(config.from_environment()))
        drafts = view.speculative_draft_model_path is not None
    cores = core_division.cores_of(os.sched_getaffinity(0) - pinned)
    spare = core_division.share_of(cores) if drafts and not pinned else 0
    ranks.place(ranks_here, cores, spare=spare)
