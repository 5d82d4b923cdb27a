"""The network of a Hydra head, which drafts without attention.

It reads a state of its model and the embedding of the token that was drawn behind it, and drafts
the next token. For the token after that one it reads its own output in place of the state. So each
token depends on the one before, as in the sequentially dependent heads of Ankner et al. (2024,
arXiv 2402.05109). A head drafts the most frequent ids alone, so that it has few weights to read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sglang_qspec.heads.config import HeadConfig
from sglang_qspec.heads.own_ids import OwnIds


class HydraHead(OwnIds):
    """A Hydra head."""

    def __init__(self, config: HeadConfig) -> None:
        """Make a head with random weights. It drafts the model's lowest ids."""
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, config.inner_size
        self.embed_norm = LlamaRMSNorm(width)
        self.state_norm = LlamaRMSNorm(width)
        self.up = nn.Linear(2 * width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.norm = LlamaRMSNorm(width)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def output(self, embeds: Tensor, states: Tensor) -> Tensor:
        """What `logits` reads, and the next token of a chain in place of a state: [..., width].

        `embeds` are the embeddings of the tokens drawn behind `states`; both are [..., width].
        """
        read = torch.cat((self.embed_norm(embeds), self.state_norm(states)), -1)
        found: Tensor = states + self.down(functional.silu(self.up(read)))
        return found

    def logits(self, output: Tensor) -> Tensor:
        """Logits of the head's own ids after rows with this `output`, [..., draft ids]."""
        found: Tensor = self.lm_head(self.norm(output))
        return found
