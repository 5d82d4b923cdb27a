"""Stand-in for sgl_kernel on CPUs for which it is not built: re-exports torch functions.

Python finds it only if `sglang_qspec.cpu.install` has put its parent folder on `sys.path`. It must
not register `torch.ops.sgl_kernel.convert_weight_packed`, from which SGLang infers AMX kernels.
"""

from sglang_qspec.cpu.kernels import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)
from sglang_qspec.cpu.torch_ops import register_torch_ops

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

register_torch_ops()


def __getattr__(name: str) -> object:
    # `from sgl_kernel import x` turns this into an ImportError, which SGLang catches for optional
    # imports. In other uses the user sees this message.
    raise AttributeError(
        f"sgl_kernel.{name} has no stand-in: sglang_qspec.cpu supplies only what SGLang's CPU "
        "platform needs for dense models; for the rest install the CPU build of sgl_kernel"
    )
