"""The small operations of a decoder layer: compiled, or in as few torch calls as possible.

With few tokens per pass, the dispatch of a torch call takes longer than its arithmetic.
"""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

from sglang_qspec.cpu import row_ops


def mirrored(weight: Tensor) -> Tensor:
    """Return the weight [n] of an RMS norm as `rms_norm` takes it: twice in a row, float32 [2n]."""
    return torch.cat((weight, weight)).float()


def rms_norm(rows: Tensor, mirrored_weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of `rows` [..., n], summed in float32.

    A vector followed by its negative has the mean 0, and its variance is the mean square of the
    vector. So the first half of its layer norm, a fused torch call, is the RMS norm of the vector.
    """
    width = rows.shape[-1]
    if rows.dim() == 2 and rows.is_contiguous() and row_ops.can_run(rows, width):
        return row_ops.rms_norm(rows, mirrored_weight, eps)
    doubled = torch.cat((rows, rows.neg()), dim=-1)
    return layer_norm(doubled, (2 * width,), mirrored_weight, None, eps)[..., :width]


class Rotation:
    """The rotary embedding of a pass, in half-split (neox) form."""

    def __init__(self, cos_sin: Tensor, dtype: torch.dtype) -> None:
        """`cos_sin` [tokens, head_dim] holds the cosines of all angles and then their sines."""
        self._angles = cos_sin.float().contiguous()
        self._runs = row_ops.can_run(self._angles.to(dtype), cos_sin.shape[1] // 2)
        if not self._runs:
            cos, sin = cos_sin.to(dtype).unsqueeze(1).chunk(2, dim=-1)
            self._straight = torch.cat((cos, cos), dim=-1)
            self._crossed = torch.cat((sin.neg(), sin), dim=-1)

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate `heads` [tokens, n, head_dim]; may change them in place and return them."""
        if self._runs and heads.stride()[1:] == (heads.shape[2], 1):
            row_ops.rotate_(heads, self._angles)
            return heads
        turned = heads.roll(heads.shape[-1] // 2, -1).mul_(self._crossed)
        return (heads * self._straight).add_(turned)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return the SiLU of the first half of `gate_up` [..., 2n] times its second half: [..., n]."""
    half = gate_up.shape[-1] // 2
    if gate_up.dim() == 2 and gate_up.is_contiguous() and row_ops.can_run(gate_up, half):
        return row_ops.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
