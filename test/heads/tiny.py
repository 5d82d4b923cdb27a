"""A small random target with a tokenizer of bytes, and heads for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_qspec.heads.config import HeadConfig, HeadKind
from sglang_qspec.heads.hydra import HydraHead
from sglang_qspec.heads.medusa import MedusaHeads
from sglang_qspec.heads.model import Eagle2Head, EagleHead, Head
from sglang_qspec.heads.new_config import for_target, hydra_for_target, medusa_for_target

VOCAB, END = 260, 258
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "eos_token_id": END,
    "bos_token_id": 259,
}


def write_target(folder: Path) -> Path:
    """Write the target into a folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte and none for what is unknown."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, "<a>", "<b>", "<end>", "<begin>"]
    tokenizer = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def random_head(draft_vocab: int = 80) -> Head:
    """A head with random weights, for ids that are spread over the target's."""
    torch.manual_seed(1)
    head = Head(for_target(SHAPE, draft_vocab))
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    head.choose_ids(torch.randperm(VOCAB)[:draft_vocab].sort().values)
    return head.eval()


EAGLE2 = SHAPE | {
    "architectures": [HeadKind.EAGLE2.value],
    "model_type": "llama",
    "num_hidden_layers": 1,
}
"""The `config.json` of an EAGLE-2 head."""


def random_eagle2(*, bias: bool = True) -> Eagle2Head:
    """An EAGLE-2 head with random weights."""
    torch.manual_seed(3)
    config = HeadConfig(HeadKind.EAGLE2, 64, 64, VOCAB, VOCAB, None, 1, EAGLE2)
    head = Eagle2Head(config, bias=bias)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.1)  # it has no norm that would limit its output
    return head.eval()


def random_medusa(heads: int = 5, *, bias: bool = True) -> MedusaHeads:
    """Medusa heads with random weights, of two layers each."""
    torch.manual_seed(4)
    config = replace(medusa_for_target(SHAPE, heads), head_layers=2)
    fields = {**config.fields, "medusa_num_layers": 2, "num_hidden_layers": 2}
    found = MedusaHeads(replace(config, fields=fields), bias=bias)
    for weight in found.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return found.eval()


def random_hydra(draft_vocab: int = 80) -> HydraHead:
    """A Hydra head with random weights, which 8 bits represent exactly."""
    torch.manual_seed(5)
    head = HydraHead(hydra_for_target(SHAPE, draft_vocab))
    with torch.no_grad():
        for layer in (head.up, head.down, head.lm_head):
            digits = torch.randint(-126, 127, layer.weight.shape)
            digits[:, 0] = 127
            layer.weight.copy_(digits * 2.0**-9)
    head.choose_ids(torch.randperm(VOCAB)[:draft_vocab].sort().values)
    return head.eval()


class Drafting:
    """A head that drafts token by token, as `drafts` of a head are made."""

    def __init__(self, head: EagleHead, embedding: torch.Tensor) -> None:
        self._head, self._embedding = head, embedding
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def row(self, token: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output of the next row."""
        position = torch.tensor([[len(self.keys)]])
        embeds = self._embedding[token][None, None]
        query, key, value, residual = self._head.inputs(embeds, hidden[None, None], position)
        self.keys.append(key)
        self.values.append(value)
        mixed = functional.scaled_dot_product_attention(
            query, torch.cat(self.keys, 2), torch.cat(self.values, 2), enable_gqa=True
        )
        return self._head.output(mixed, residual)[0, 0]

    def cut(self, length: int) -> None:
        """Forget the rows from this one on."""
        del self.keys[length:], self.values[length:]
