"""Stand-in for sgl_kernel on GPUs: norms, activations, filters and the merge of attention states.

Names, arguments and in-place effects are those of sgl_kernel 0.4.10. Tensors are on any device.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

_UNUSED = ("int8_scaled_mm", "moe_sum", "moe_sum_reduce")


def __getattr__(name: str) -> object:
    if name in _UNUSED:
        from sgl_kernel.unused import unused

        return unused(name)
    # `from sgl_kernel import x` turns this into an ImportError, which SGLang catches for optional
    # imports. In other uses the user sees this message.
    raise AttributeError(
        f"sgl_kernel.{name} has no stand-in: gpu-check supplies only what a dense model in "
        "bfloat16 needs with --attention-backend triton --sampling-backend pytorch"
    )


def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """RMS norm of `input` [..., n] with `weight` [n], in float32; also written to `out`."""
    return _into(_normed(input.float(), weight.float(), eps).to(input.dtype), out)


def gemma_rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Like `rmsnorm`, but with 1 + `weight` in place of `weight`."""
    return _into(_normed(input.float(), 1 + weight.float(), eps).to(input.dtype), out)


def fused_add_rmsnorm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add `input` to `residual` in place, and write the RMS norm of the sum to `input`."""
    _add_and_norm(input, residual, weight.float(), eps)


def gemma_fused_add_rmsnorm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Like `fused_add_rmsnorm`, but with 1 + `weight` in place of `weight`."""
    _add_and_norm(input, residual, 1 + weight.float(), eps)


def silu_and_mul(
    input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """SiLU of the first half of `input` [..., 2n] times its second half: [..., n]."""
    gate, up = input.float().chunk(2, dim=-1)
    return _into((silu(gate) * up).to(input.dtype), out)


def gelu_and_mul(
    input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Like `silu_and_mul`, but with the exact GELU."""
    gate, up = input.float().chunk(2, dim=-1)
    return _into((gelu(gate) * up).to(input.dtype), out)


def gelu_tanh_and_mul(
    input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """Like `silu_and_mul`, but with the tanh approximation of GELU."""
    gate, up = input.float().chunk(2, dim=-1)
    return _into((gelu(gate, approximate="tanh") * up).to(input.dtype), out)


def top_k_renorm_prob(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """`probs` [n, V] without tokens less likely than the k-th, renormalised; `top_k` int [n]."""
    ranked = probs.sort(dim=-1, descending=True).values
    last = torch.as_tensor(top_k, device=probs.device).long().expand(len(probs))
    least = ranked.gather(1, (last.clamp(1, probs.shape[1]) - 1).unsqueeze(1))
    return _renormed(probs, probs >= least)


def top_p_renorm_prob(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """`probs` [n, V] without tokens behind the mass `top_p` float [n], renormalised."""
    ranked, order = probs.sort(dim=-1, descending=True)
    mass = torch.as_tensor(top_p, device=probs.device).float().expand(len(probs)).unsqueeze(1)
    kept = ranked.cumsum(-1) - ranked < mass
    return _renormed(probs, torch.zeros_like(kept).scatter(1, order, kept))


def merge_state_v2(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over two parts of a text, from the results of the parts.

    `v_a` and `v_b` [n, heads, dim] are outputs, `s_a` and `s_b` float32 [n, heads] the logarithms
    of the sums of exponentials; -inf for an empty part.
    """
    total = torch.logaddexp(s_a.float(), s_b.float())
    parts = []
    for values, logs in ((v_a, s_a), (v_b, s_b)):
        share = torch.exp(logs.float() - total).nan_to_num(0.0).unsqueeze(-1)
        parts.append(values.float() * share)
    return _into((parts[0] + parts[1]).to(v_a.dtype), v_merged), _into(total, s_merged)


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, which keeps its memory; the real function lets other tensors reuse it."""
    return tensor


def _normed(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight


def _add_and_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_normed(total, weight, eps))


def _renormed(probs: Tensor, kept: Tensor) -> Tensor:
    left = probs * kept
    return left / left.sum(-1, keepdim=True)


def _into(values: Tensor, out: Tensor | None) -> Tensor:
    return values if out is None else out.copy_(values)
