"""The networks of EAGLE heads, without their attention over earlier tokens.

Row i of a head reads the target's hidden states at token i and the embedding of token i + 1, and
drafts token i + 2. Behind the last state that the target has computed, it reads its own output of
the row before in place of the target's states. An EAGLE-3 head reads the outputs of several layers
of the target (Li et al. 2025, arXiv 2503.01840). An EAGLE-2 head reads what the target's LM head
reads, and drafts with that LM head (Li et al. 2024, arXiv 2401.15077 and 2406.16858; versions 1 and
2 have the same network).

Training and drafting keep keys and values in different ways, so the classes compute what comes
before and after the attention. Weights have the names of published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from sglang_qspec.heads.config import HeadConfig
from sglang_qspec.heads.own_ids import OwnIds


class HeadAttention(nn.Module):
    """The projections of the attention."""

    def __init__(self, config: LlamaConfig, inputs: int) -> None:
        """`inputs` is the width of what it reads."""
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.heads = heads
        self.kv_heads = config.num_key_value_heads or heads
        self.head_dim = getattr(config, "head_dim", None) or width // heads
        self.q_proj = nn.Linear(inputs, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)


class DecoderLayer(nn.Module):
    """A decoder layer without norms before its attention."""

    def __init__(self, config: LlamaConfig, inputs: int) -> None:
        """`inputs` is the width of what the attention reads."""
        super().__init__()
        self.self_attn = HeadAttention(config, inputs)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)


class NormedLayer(DecoderLayer):
    """The decoder layer of an EAGLE-3 head, which reads an embedding and a state, side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class _Eagle(nn.Module):
    """What both kinds of heads share. `width` is `HeadConfig.hidden_size`."""

    midlayer: DecoderLayer

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        given: Any = dict(config.fields)
        given.pop("architectures", None)
        self._llama = LlamaConfig(**given)
        self.rotary = LlamaRotaryEmbedding(self._llama)

    def _attention_inputs(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, [batch, heads, tokens, head width], of rows [batch, tokens, n].

        `positions` is int64 [batch, tokens].
        """
        attention = self.midlayer.self_attn

        def split(projection: nn.Linear, heads: int) -> Tensor:
            return projection(rows).unflatten(-1, (heads, attention.head_dim)).transpose(1, 2)

        query = split(attention.q_proj, attention.heads)
        key = split(attention.k_proj, attention.kv_heads)
        value = split(attention.v_proj, attention.kv_heads)
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(value, positions))
        return query, key, value

    def output(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """The output of rows, [batch, tokens, width], which the next rows read.

        `mixed` is the result of the attention, [batch, heads, tokens, head width], and `residual`
        comes from `inputs`.
        """
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        found: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return found


class Head(OwnIds, _Eagle):
    """An EAGLE-3 head."""

    midlayer: NormedLayer

    def __init__(self, config: HeadConfig) -> None:
        """Make a head with random weights. It drafts the target's lowest ids."""
        super().__init__(config)
        self.fc = nn.Linear(config.states * config.target_hidden_size, config.hidden_size, False)
        self.midlayer = NormedLayer(self._llama)
        self.norm = LlamaRMSNorm(config.hidden_size, self._llama.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def project(self, states: Tensor) -> Tensor:
        """The target's hidden states, [..., states * target width], as the head reads them."""
        projected: Tensor = self.fc(states)
        return projected

    def inputs(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value of rows, [batch, heads, tokens, head width], and their residual.

        `embeds` and `hidden` are [batch, tokens, width]: the embeddings of the tokens, and the
        projected states or the head's own output before them. `positions` is int64 [batch, tokens].
        """
        layer = self.midlayer
        rows = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), -1)
        return *self._attention_inputs(rows, positions), hidden

    def logits(self, output: Tensor) -> Tensor:
        """Logits of the head's own ids after rows with this `output`, [..., draft ids]."""
        found: Tensor = self.lm_head(self.norm(output))
        return found


class Eagle2Head(_Eagle):
    """An EAGLE-2 head. It drafts any id of the target, with the target's LM head."""

    def __init__(self, config: HeadConfig, *, bias: bool = True) -> None:
        """Make a head with random weights; `bias` says whether `fc` has one."""
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias)
        self.midlayer = DecoderLayer(self._llama, config.hidden_size)
        self.lm_head: Tensor | None = None
        """The target's LM head, [vocab, width]; `logits` needs it. It is no weight of the head."""

    def project(self, states: Tensor) -> Tensor:
        """The target's last states, [..., width], as the head reads them: unchanged."""
        return states

    def inputs(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `Head.inputs`."""
        rows = self.fc(torch.cat((embeds, hidden), -1))
        return *self._attention_inputs(rows, positions), rows

    def logits(self, output: Tensor) -> Tensor:
        """Logits of the target's ids after rows with this `output`, [..., vocab]."""
        assert self.lm_head is not None, "the target's LM head was not given"
        return functional.linear(output, self.lm_head)

    @property
    def target_ids(self) -> Tensor:
        """The target's ids, int64 [vocab], all of which the head drafts."""
        return torch.arange(self.config.vocab_size, device=self.fc.weight.device)


EagleHead = Head | Eagle2Head
