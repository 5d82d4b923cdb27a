"""Loads the draft model with SGLang's model runner, for `sidecar.draft_model`.

SGLang has one configuration per process, so a process can load only one model. Its modules are
imported when a model is loaded: they take seconds, and need the kernels that its plugins supply.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from sglang_qspec.config import SHARED_FRACTION, SLOTS_ON_CPU, SLOTS_ON_GPU
from sglang_qspec.cpu.dense_linear import can_pack
from sglang_qspec.errors import DraftModelError
from sglang_qspec.sidecar import marlin as kernels
from sglang_qspec.sidecar.batch_scheduler import READ_ON_CPU, READ_ON_GPU
from sglang_qspec.sidecar.lazy_zeros import LazyZeros
from sglang_qspec.sidecar.memory import RUNTIME_BYTES, kv_bytes, release_unused, table_bytes
from sglang_qspec.sidecar.working_memory import fixed_bytes

FEWEST_ROWS = 256
"""Number of rows of KV that a draft model has at least by default."""


class LoadError(DraftModelError):
    """The draft model cannot be loaded."""

    def __init__(self, message: str, *, is_final: bool = True) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether another attempt would fail too."""


@dataclass(frozen=True)
class DraftModelOptions:
    """Options for loading a draft model. None stands for SGLang's default."""

    model_path: str
    """Local checkpoint, or name of a model on a hub."""
    revision: str | None = None
    """Branch, tag or commit of the model's weights, code and tokenizer on a hub."""
    quantization: str | None = None
    """SGLang's quantization method; None selects the checkpoint's method."""
    dtype: str = "auto"
    """Data type of the activations."""
    load_format: str | None = None
    """SGLang's format of the weights, such as dummy for random ones; None selects by the files."""
    device: str | None = None
    """`cpu`, or `cuda` for the first GPU that this process sees."""
    mem_fraction: float | None = None
    """Fraction of the device's memory for weights, KV and, on a GPU, working memory. None means all
    free memory on a GPU, and SHARED_FRACTION on a CPU."""
    max_total_tokens: int | None = None
    """Maximum number of KV slots, even if `mem_fraction` allows more."""
    context_len: int | None = None
    """Maximum length of prompt and completion, in tokens; None selects the model's maximum."""
    rows: int | None = None
    """Maximum number of open rows; None means four times `batch`, and at least FEWEST_ROWS."""
    batch: int | None = None
    """Maximum number of rows in a decode pass; None means SLOTS_ON_CPU or SLOTS_ON_GPU. CUDA graphs
    are captured up to this batch size."""
    prefill_tokens: int | None = None
    """Maximum number of prompt tokens in a pass; None means READ_ON_CPU or READ_ON_GPU."""
    attention_backend: str | None = None
    """Name of an attention backend of SGLang; None selects one that can read pages of one token."""
    trust_remote_code: bool = False
    """Whether to run code that the model ships."""


def import_modules() -> None:
    """Import what `load` needs of SGLang."""
    # Plugins load first, because the QSPEC plugin may supply kernels that sglang's modules import.
    from sglang.srt.plugins import load_plugins

    load_plugins()

    for name in ("model_executor.model_runner", "models.registry"):
        importlib.import_module(f"sglang.srt.{name}")


def load(options: DraftModelOptions) -> tuple[Any, int]:
    """Load the model into an SGLang ModelRunner.

    Returns it with the bytes of a GPU that weights, KV and the table of rows take; 0 on a CPU. The
    steps follow sglang/benchmark/one_batch.py (0.5.23), which needs no scheduler either.
    """
    import_modules()

    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs

    if not _on_cpu(options):
        kernels.check_checkpoint(Path(options.model_path), quantization=options.quantization)
    # With this setting SGLang would make a pool without slots, and would size it after this
    # function.
    envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.set(False)
    args = server_args(options)
    with as_load_error(options):
        args.resolve_once()
    rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
    initialize_fp4_gemm_config()

    port = PortArgs.init_new(args).nccl_port
    with as_load_error(options):
        model_config = ModelConfig.from_server_args(args)
        bootstrap.init_parallel_runtime(
            server_args=args, device=get_device().device, dist_port=port
        )
        bootstrap.init_layer_runtime(model_config=model_config)
        before = _private_bytes()
        runner = ModelRunner(
            model_config=model_config,
            mem_fraction_static=resolving_view(args).mem_fraction_static,
            gpu_id=0,
            nccl_port=port,
            server_args=args,
        )
        release_unused()
        loaded = _private_bytes() - before
        loaded += head_copy_bytes(runner.model, quantized=bool(model_config.quantization))
        context_len = int(model_config.context_len)
        lazily = LazyZeros() if _on_cpu(options) else contextlib.nullcontext()
        with fixed_kv(options, runner.model, loaded, context_len), lazily:
            runner.alloc_memory_pool()
        fixed = 0 if _on_cpu(options) else fixed_bytes()
        runner.init_attention_backends()
        runner.init_cuda_graphs()
    return runner, fixed


@contextlib.contextmanager
def as_load_error(options: DraftModelOptions) -> Iterator[None]:
    """Turn any exception of SGLang into a LoadError with the first line of its message.

    SGLang raises a plain Exception if it cannot capture a CUDA graph, for example because a kernel
    does not take the shape of a layer. A lack of memory or an unreachable file may be temporary.
    """
    try:
        yield
    except DraftModelError as error:
        raise LoadError(f"draft model {options.model_path}: {error}") from error
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        passing = "out of memory" in str(error) or isinstance(error, OSError)
        raise LoadError(
            f"draft model {options.model_path}: {reason}", is_final=not passing
        ) from error


def _private_bytes() -> int:
    """Memory of this process that no other process shares, in bytes."""
    return int(psutil.Process().memory_full_info().uss)


def head_copy_bytes(model: torch.nn.Module, *, quantized: bool) -> int:
    """Bytes of the packed copy of the LM head that the first pass on a CPU makes."""
    head: Any = getattr(getattr(model, "lm_head", None), "weight", None)
    if head is None:
        return 0
    if quantized:
        return int(head.numel())
    return int(head.nbytes) if can_pack(head) else 0


@contextlib.contextmanager
def fixed_kv(
    options: DraftModelOptions, model: torch.nn.Module, loaded: int, context_len: int
) -> Iterator[None]:
    """Let SGLang size the KV by `mem_fraction` of the whole device.

    SGLang takes a fraction of the free memory, which depends on the other processes of the device.
    On a CPU the model has taken `loaded` bytes: packed weights are not among its parameters. On a
    GPU the table of rows, which have up to `context_len` tokens, is not part of the KV either.
    """
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    on_cpu = _on_cpu(options)
    fraction = options.mem_fraction or (SHARED_FRACTION if on_cpu else None)
    if fraction is None:
        yield
        return
    if on_cpu:
        total, runtime = psutil.virtual_memory().total, 0
        held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        weights = max(held, loaded)
    else:
        total = torch.cuda.mem_get_info(0)[1]
        runtime = RUNTIME_BYTES + table_bytes(kv_rows(options), context_len)
        torch.cuda.empty_cache()
        weights = torch.cuda.memory_reserved(0)
    left = kv_bytes(total, fraction, weights, runtime)
    original = KVCacheConfigurator._profile_available_bytes
    KVCacheConfigurator._profile_available_bytes = lambda *_: left
    try:
        yield
    finally:
        KVCacheConfigurator._profile_available_bytes = original


def _on_cpu(options: DraftModelOptions) -> bool:
    return options.device == "cpu" or not torch.cuda.is_available()


def prefill_tokens(options: DraftModelOptions) -> int:
    return options.prefill_tokens or (READ_ON_CPU if _on_cpu(options) else READ_ON_GPU)


def slots(options: DraftModelOptions) -> int:
    """Maximum number of rows in a decode pass."""
    return options.batch or (SLOTS_ON_CPU if _on_cpu(options) else SLOTS_ON_GPU)


def kv_rows(options: DraftModelOptions) -> int:
    """Maximum number of open rows."""
    return options.rows or max(FEWEST_ROWS, 4 * slots(options))


def _attention_backend(options: DraftModelOptions) -> str | None:
    """An attention backend for pages of one token; None if SGLang's default can read them.

    On Blackwell (sm100) SGLang's default needs larger pages: trtllm_mha, or trtllm_mla.
    """
    from sglang.srt.runtime_context import get_platform

    if options.attention_backend is not None or _on_cpu(options) or not get_platform().is_sm100:
        return options.attention_backend
    return "flashinfer" if get_platform().has_flashinfer else "triton"


def server_args(options: DraftModelOptions) -> Any:
    """SGLang's arguments for a model without scheduler features."""
    from sglang.srt.server_args import ServerArgs

    given = {
        "revision": options.revision,
        "quantization": options.quantization,
        "load_format": options.load_format,
        "device": options.device,
        "mem_fraction_static": options.mem_fraction,
        "max_total_tokens": options.max_total_tokens,
        "context_length": options.context_len,
        "attention_backend": _attention_backend(options),
    }
    return ServerArgs(
        model_path=options.model_path,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        page_size=1,
        max_running_requests=kv_rows(options),
        cuda_graph_max_bs_decode=slots(options),
        cuda_graph_max_bs_prefill=prefill_tokens(options),
        chunked_prefill_size=prefill_tokens(options),
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        log_level="warning",
        **{name: value for name, value in given.items() if value is not None},
    )
