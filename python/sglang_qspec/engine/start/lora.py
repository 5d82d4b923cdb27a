"""LoRA adapters on the target: the checks, and the passes that keep adapters apart.

The target verifies drafts with the adapter of each request. The draft model has no adapters. SGLang
prepares LoRA for each pass by the number of rows of each request. In eager passes it takes the
numbers from the pass. In CUDA graphs it takes them from buffers that have one width. A plain pass,
or a pass of another width, would apply an adapter to the rows of another request. So a GPU server
with LoRA captures no decode graphs. On GPUs all requests of a pass have one width, because SGLang's
LoRA does not support ragged passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_qspec import config
from sglang_qspec.config import QSpecConfig
from sglang_qspec.cpu.install import install_kernels
from sglang_qspec.engine.placement.devices import kind_of
from sglang_qspec.errors import ConfigError

CPU_BACKEND = "torch_native"
"""SGLang's LoRA backend that runs on CPUs (`engine.cpu.lora`)."""


def is_enabled(view: Any) -> bool:
    """Whether the server has LoRA adapters; `--lora-paths` alone enables them, as in SGLang."""
    return bool(view.enable_lora) or (view.enable_lora is None and bool(view.lora_paths))


def resolve_graphs(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's `handle_cuda_graph_config`: capture no decode graphs of a target with LoRA.

    Settings that ask for decode graphs win in SGLang, so `check` refuses them.
    """
    view = resolving_view(server_args)
    if config.is_qspec(view) and is_enabled(view):
        declare_resolution(server_args, "qspec", disable_decode_cuda_graph=True)
    previous(server_args)


def check(view: Any, settings: QSpecConfig) -> None:
    """Check the settings of a server with LoRA; raises ConfigError.

    `view` is SGLang's resolving view of its server arguments. A server without LoRA passes.
    """
    if not is_enabled(view):
        return
    if settings.prefill_drafts == "on":
        raise ConfigError(
            f"{config.flag('prefill_drafts')} is 'on', but must be 'off' with --enable-lora: "
            "SGLang applies an adapter of the LM head to the last token of a prompt only"
        )
    if kind_of(view) == "cpu":
        _check_cpu(view)
    else:
        _check_gpu(view, settings)


def _check_cpu(view: Any) -> None:
    if not install_kernels():
        raise ConfigError(
            "--enable-lora is True, but on a CPU with SGLang's own kernels SGLang's LoRA needs a "
            "GPU: leave it out"
        )
    if view.lora_backend != CPU_BACKEND:
        raise ConfigError(
            f"--lora-backend is {view.lora_backend}, but must be {CPU_BACKEND} on a CPU: the other "
            "backends are GPU kernels"
        )
    if view.enable_lora_overlap_loading:
        raise ConfigError(
            "--enable-lora-overlap-loading is True, but must be False on a CPU: it copies adapters "
            "on a CUDA stream"
        )


def _check_gpu(view: Any, settings: QSpecConfig) -> None:
    if settings.verify == "ragged":
        raise ConfigError(
            f"{config.flag('verify')} is 'ragged', but must be 'auto' or 'tree' with "
            "--enable-lora: SGLang's LoRA expects the same number of tokens of all requests"
        )
    config.to_environment({"verify": "tree"})
    backend = view.cuda_graph_config.decode.backend
    if backend != Backend.DISABLED:
        raise ConfigError(
            f"the decode phase of --cuda-graph-config, or --cuda-graph-backend-decode, is "
            f"{backend!r}, but must be {Backend.DISABLED!r} with --enable-lora: SGLang's LoRA "
            "captures one width, and QSPEC verifies several"
        )
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        raise ConfigError(
            "SGLANG_ENABLE_OVERLAP_PLAN_STREAM is true, but must be false with --enable-lora: "
            "SGLang would prepare adapters while another pass uses them"
        )


def allow(target: Callable[[Any], None], server_args: Any) -> None:
    """Around SGLang's `check_lora_speculative_compatibility`, which does not know QSPEC.

    `check` has run before.
    """
    if not config.is_qspec(resolving_view(server_args)):
        target(server_args)
