"""Runs LoRA adapters on a CPU: SGLang's backend `torch_native` without a GPU driver.

SGLang 0.5.23 pins the memory of its LoRA layers and of each batch, which fails without a GPU. In a
verify pass its backend expects the same number of rows of all requests. In the LM head it expects
all rows of a prompt. `CpuLoRA` counts the rows of each request, and `install` makes SGLang create
the layers without pinned memory.

`engine.cpu.llama` leaves models with LoRA layers to SGLang's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.lora.backend.lora_registry import register_lora_backend
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend, TorchNativeLoRABatchInfo
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.torch_ops import sgemm_lora_a_fwd, sgemm_lora_b_fwd
from sglang.srt.lora.utils import get_lm_head_pruned_lens
from torch.overrides import TorchFunctionMode

from sglang_qspec.engine.cpu.dense_linear import WRAPPER

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from torch import Tensor

NAME = "torch_native"
"""Name of the backend in SGLang."""
GPU_DEFAULT = "csgmv"
"""SGLang's default of --lora-backend, which a CPU cannot run."""


class CpuLoRA(TorchNativeLoRABackend):
    """SGLang's backend for adapters in torch, with the rows of each request counted here."""

    skip_inactive_lora_batches = True
    """Batches without adapters run the layers alone."""

    def validate_lora_targets(self, base_model: Any, target_modules: set[str]) -> None:
        """Refuse layers that adapters cannot be added to on a CPU; raises ValueError."""
        for name, module in base_model.named_modules():
            if name.split(".")[-1] in target_modules and not any(True for _ in module.parameters()):
                raise ValueError(
                    f"{name} has quantized weights, but on a CPU a LoRA adapter needs the weights "
                    "of the layer in a floating-point type"
                )
            if isinstance(module, FusedMoE) and {"gate_up_proj", "down_proj"} & target_modules:
                raise ValueError(
                    f"{name} has experts, but on a CPU a LoRA adapter can only change attention "
                    "and dense layers"
                )

    def prepare_lora_batch(
        self,
        forward_batch: ForwardBatch,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """Note which rows of the pass use which adapter.

        `weight_indices` has the number of the adapter of each request, `lora_ranks` and `scalings`
        the rank and the factor of each adapter.
        """

        def info(adapters: Sequence[int], rows: Sequence[int]) -> TorchNativeLoRABatchInfo:
            return _batch_info(adapters, rows, lora_ranks, scalings)

        self.batch_info = info(weight_indices, rows_of(forward_batch))
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = None
        pruned = get_lm_head_pruned_lens(forward_batch)
        if pruned is not None:
            self.lm_head_batch_info = info(weight_indices, pruned)
            passes = self._get_lm_head_pass_segments(weight_indices, pruned)
            if passes is not None:
                self.lm_head_pass_batch_infos = [info(*segments) for segments in passes]

    def run_lora_a_sgemm(
        self,
        x: Tensor,
        weights: Tensor,
        stack_num: int = 1,
        *args: Any,
        pruned_batch_info: Any = None,
        **options: Any,
    ) -> Tensor:
        """Multiply the rows by A of their adapters."""
        product: Tensor = sgemm_lora_a_fwd(
            inputs=x,
            weights=weights,
            batch_info=pruned_batch_info or self.batch_info,
            num_slices=stack_num,
        )
        return product

    def run_lora_b_sgemm(
        self,
        x: Tensor,
        weights: Tensor,
        output_offset_cpu: Tensor | None = None,
        base_output: Tensor | None = None,
        *args: Any,
        output_offset: Tensor | None = None,
        pruned_batch_info: Any = None,
        **options: Any,
    ) -> Tensor:
        """Add the products of the rows with B of their adapters to `base_output`."""
        total: Tensor = sgemm_lora_b_fwd(
            inputs=x,
            weights=weights,
            batch_info=pruned_batch_info or self.batch_info,
            slice_offsets=output_offset if output_offset_cpu is None else output_offset_cpu,
            base_output=base_output,
        )
        return total


def rows_of(forward_batch: ForwardBatch) -> list[int]:
    """Number of rows of each request in a pass."""
    mode, requests = forward_batch.forward_mode, forward_batch.batch_size
    if mode.is_decode():
        return [1] * requests
    if mode.is_target_verify():
        layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
        if layout is None:
            return [forward_batch.spec_info.draft_token_num] * requests
        return list(layout.verify_lens_cpu)
    return list(forward_batch.extend_seq_lens_cpu) if mode.is_extend() else []


def _batch_info(
    adapters: Sequence[int], rows: Sequence[int], ranks: list[int], scalings: list[float]
) -> TorchNativeLoRABatchInfo:
    """What SGLang's operators in torch read: rows and adapter of each segment."""
    lens = torch.tensor(rows, dtype=torch.int32)
    indices = torch.tensor(adapters, dtype=torch.int32)
    indptr = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    factors = torch.tensor(scalings, dtype=torch.float)
    return TorchNativeLoRABatchInfo(
        use_cuda_graph=False,
        bs=len(rows),
        num_segments=len(rows),
        seg_indptr=indptr,
        weight_indices=indices,
        lora_ranks=torch.tensor(ranks, dtype=torch.int32),
        scalings=factors,
        max_len=max(rows, default=0),
        seg_lens=lens,
        expected_tokens=sum(rows),
        # SGLang's operators in torch loop over the following lists.
        lora_ranks_cpu=ranks,
        seg_indptr_cpu=indptr,
        seg_lens_cpu=list(rows),
        weight_indices_cpu=list(adapters),
        scalings_cpu=factors,
    )


class _Unpinned(TorchFunctionMode):
    """Within this context torch pins no memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        given.pop("pin_memory", None)
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **given)


def _make_unpinned(init_state: Callable[..., None]) -> Callable[..., None]:
    """Around `LoRAManager.init_state`, which wraps the layers of the model."""

    @wraps(init_state)
    def init(manager: LoRAManager, *args: Any, **given: Any) -> None:
        with _Unpinned():
            init_state(manager, *args, **given)
        for module in manager.base_model.modules():
            if isinstance(module, BaseLayerWithLoRA) and isinstance(module.base_layer, LinearBase):
                vars(module.base_layer)[WRAPPER] = module

    return init


def install() -> None:
    """Replace SGLang's backend in this process; repeated calls have no further effect."""
    if not hasattr(LoRAManager.init_state, "__wrapped__"):
        LoRAManager.init_state = _make_unpinned(LoRAManager.init_state)
        register_lora_backend(NAME)(lambda: CpuLoRA)
