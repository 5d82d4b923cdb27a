"""The small operations of a decoder layer, in as few torch calls as possible.

With few tokens per pass, the dispatch of a torch call takes longer than its arithmetic.
"""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu


def mirrored(weight: Tensor) -> Tensor:
    """Return the weight [n] of an RMS norm as `rms_norm` takes it: twice in a row, float32 [2n]."""
    return torch.cat((weight, weight)).float()


def rms_norm(rows: Tensor, mirrored_weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of `rows` [..., n], summed in float32.

    A vector followed by its negative has the mean 0, and its variance is the mean square of the
    vector. So the first half of its layer norm, a fused torch call, is the RMS norm of the vector.
    """
    width = rows.shape[-1]
    doubled = torch.cat((rows, rows.neg()), dim=-1)
    return layer_norm(doubled, (2 * width,), mirrored_weight, None, eps)[..., :width]


def rotation(cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two factors for `rotate`, [tokens, 1, head_dim], from `cos_sin` [tokens, head_dim].

    `cos_sin` holds the cosines of all angles and then their sines.
    """
    cos, sin = cos_sin.to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin.neg(), sin), dim=-1)


def rotate(heads: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding, in half-split (neox) form, to `heads` [tokens, n, head_dim]."""
    straight, crossed = factors
    return (heads * straight).add_(heads.roll(heads.shape[-1] // 2, -1).mul_(crossed))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return the SiLU of the first half of `gate_up` [..., 2n] times its second half: [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
