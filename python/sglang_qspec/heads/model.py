"""The network of an EAGLE-3 head, without its attention over earlier tokens.

Row i of a head reads the target's hidden states at token i and the embedding of token i + 1, and
drafts token i + 2. Behind the last state that the target has computed, it reads its own output of
the row before in place of the target's states. (Li et al. 2025, arXiv 2503.01840.)

Training and drafting keep keys and values in different ways, so `Head` computes what comes before
and after the attention. Weights have the names of published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from sglang_qspec.heads.config import HeadConfig


class HeadAttention(nn.Module):
    """The projections of the attention. Its input is twice as wide as its output."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.heads = heads
        self.kv_heads = config.num_key_value_heads or heads
        self.head_dim = getattr(config, "head_dim", None) or width // heads
        self.q_proj = nn.Linear(2 * width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)


class DecoderLayer(nn.Module):
    """The decoder layer of a head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.self_attn = HeadAttention(config)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.mlp = LlamaMLP(config)


class Head(nn.Module):
    """An EAGLE-3 head. `width` is `HeadConfig.hidden_size`."""

    d2t: Tensor
    """Int64 [draft ids]: what to add to each of the head's ids for the target's id."""

    def __init__(self, config: HeadConfig) -> None:
        """Make a head with random weights. It drafts the target's lowest ids."""
        super().__init__()
        self.config = config
        given: Any = dict(config.fields)
        given.pop("architectures", None)
        llama = LlamaConfig(**given)
        self.fc = nn.Linear(config.states * config.target_hidden_size, config.hidden_size, False)
        self.midlayer = DecoderLayer(llama)
        self.norm = LlamaRMSNorm(config.hidden_size, llama.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def project(self, states: Tensor) -> Tensor:
        """The target's hidden states, [..., states * target width], as the head reads them."""
        projected: Tensor = self.fc(states)
        return projected

    def inputs(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of rows: [batch, heads, tokens, head width].

        `embeds` and `hidden` are [batch, tokens, width]: the embeddings of the tokens, and the
        projected states or the head's own output before them. `positions` is int64 [batch, tokens].
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        rows = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), -1)

        def split(projection: nn.Linear, heads: int) -> Tensor:
            return projection(rows).unflatten(-1, (heads, attention.head_dim)).transpose(1, 2)

        query = split(attention.q_proj, attention.heads)
        key = split(attention.k_proj, attention.kv_heads)
        value = split(attention.v_proj, attention.kv_heads)
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(value, positions))
        return query, key, value

    def output(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """The output of rows, [batch, tokens, width], which the next rows read.

        `mixed` is the result of the attention, [batch, heads, tokens, head width], and `hidden` the
        input of `inputs`.
        """
        layer = self.midlayer
        hidden = hidden + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        found: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return found

    def logits(self, output: Tensor) -> Tensor:
        """Logits of the head's own ids after rows with this `output`, [..., draft ids]."""
        found: Tensor = self.lm_head(self.norm(output))
        return found

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each of the head's ids, int64 [draft ids]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def choose_ids(self, ids: Tensor) -> None:
        """Draft these ids of the target, int64 [draft ids], distinct and in rising order."""
        self.d2t = ids - torch.arange(len(ids), device=ids.device)
