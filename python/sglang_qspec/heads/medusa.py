"""The network of Medusa heads: each drafts one of the next tokens, from the same state.

Head i reads the target's state behind which the target has drawn its newest token, and drafts the
token i + 1 places after that one. (Cai et al. 2024, arXiv 2401.10774.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sglang_qspec.heads.config import HeadConfig


class ResidualBlock(nn.Module):
    """The layers of one head before its LM head."""

    def __init__(self, width: int, layers: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(layers))

    def forward(self, states: Tensor) -> Tensor:
        """What the LM head reads, of the shape of `states`, [..., width]."""
        for layer in self.layers:
            states = states + functional.silu(layer(states))
        return states


class MedusaHeads(nn.Module):
    """All heads of a target. Weights have vLLM's names."""

    def __init__(self, config: HeadConfig, *, bias: bool = True) -> None:
        """Make heads with random weights; `bias` says whether their layers have one."""
        super().__init__()
        self.config = config
        width, ids = config.hidden_size, config.vocab_size
        self.blocks = nn.ModuleList(
            ResidualBlock(width, config.head_layers, bias=bias) for _ in range(config.heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(width, ids, False) for _ in range(config.heads))

    def output(self, states: Tensor, number: int) -> Tensor:
        """What the LM head of a head reads, [..., width], of the target's last `states`."""
        found: Tensor = self.blocks[number](states)
        return found

    def logits(self, output: Tensor, number: int) -> Tensor:
        """Logits of a head with this `output`, [..., vocab]."""
        found: Tensor = self.lm_heads[number](output)
        return found

    @property
    def target_ids(self) -> Tensor:
        """The target's ids, int64 [vocab], all of which the heads draft."""
        return torch.arange(self.config.vocab_size, device=next(self.parameters()).device)
