"""Stand-in for sgl_kernel.speculative."""

from sglang_qspec.cpu.kernels import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
