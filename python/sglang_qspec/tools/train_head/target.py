"""The target of a head, run by transformers: it writes texts, and shows its states along them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.models.prompts import chat_ids

PAD = 0
"""Token id of padding, which the attention mask or the causal order hides."""


class WrittenText(NamedTuple):
    """A prompt with an answer of the target, as token ids."""

    prompt: list[int]
    answer: list[int]
    greedy: bool
    """Whether each token of the answer is the target's likeliest."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]


class TargetStates(NamedTuple):
    """What the target computes along some texts."""

    read: Tensor
    """The states that a head reads, [texts, tokens, states * width]."""
    last: Tensor
    """The states that the target's LM head reads, [texts, tokens, width]."""


class TargetModel:
    """A causal language model."""

    def __init__(self, folder: Path, dtype: str = "auto") -> None:
        """Load the model and its tokenizer.

        `dtype` is float32, bfloat16, or auto: bfloat16 where that is faster.
        """
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        fast = self.device.type == "cuda" or torch.cpu._is_amx_tile_supported()
        half = fast if dtype == "auto" else dtype == "bfloat16"
        given = torch.bfloat16 if half else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=given)
        self._model = model.to(self.device).eval().requires_grad_(False)
        if self._model.get_output_embeddings() is None or not hasattr(model.base_model, "norm"):
            raise QSpecError(
                f"{folder} is a {type(model).__name__}, but only models with an LM head behind a "
                "last norm can have a head"
            )
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    @property
    def config(self) -> dict[str, Any]:
        """The content of the model's `config.json`."""
        content: dict[str, Any] = self._model.config.to_dict()
        return content

    @property
    def embedding(self) -> Tensor:
        """The embeddings of its token ids, [vocab, width]."""
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    @property
    def lm_head(self) -> Tensor:
        """The weights of its LM head, [vocab, width]."""
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    @property
    def norm(self) -> Tensor:
        """The weights of the norm before its LM head, [width]."""
        weight: Tensor = self._model.base_model.norm.weight
        return weight

    @property
    def is_fast(self) -> bool:
        """Whether it computes in 16 bits."""
        return bool(self._model.dtype == torch.bfloat16)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, in the model's chat template if it has one."""
        return chat_ids(self._tokenizer, texts)

    @torch.inference_mode()
    def answers(
        self, prompts: Sequence[list[int]], tokens: int, *, greedy: bool, seed: int
    ) -> list[list[int]]:
        """Answers of at most `tokens` tokens, each with its end-of-sequence token if it ends."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), PAD, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        torch.manual_seed(seed)
        sampling: dict[str, float | None] = {"temperature": None, "top_p": None, "top_k": None}
        if not greedy:
            sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        ends = self._model.generation_config.eos_token_id
        found = self._model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            do_sample=not greedy,
            max_new_tokens=tokens,
            pad_token_id=PAD,
            repetition_penalty=1.0,
            **sampling,
        )
        stops = frozenset([ends] if isinstance(ends, int) else ends or ())
        return [_until(row, stops) for row in found[:, longest:].tolist()]

    @torch.inference_mode()
    def states(self, ids: Tensor, layers: Sequence[int]) -> TargetStates:
        """The outputs of `layers`, and of all layers, along texts, int64 [texts, tokens].

        Without `layers` a head reads the outputs of all layers. Padding follows the texts, so
        causal attention hides it.
        """
        found = self._model.base_model(ids, use_cache=False, output_hidden_states=True)
        # Number 0 are the embeddings, and the last one follows the last norm.
        states = found.hidden_states
        read = torch.cat([states[layer + 1] for layer in layers], -1) if layers else states[-1]
        return TargetStates(read, states[-1])


def _until(token_ids: list[int], stops: frozenset[int]) -> list[int]:
    """The tokens up to the first stop token, and that one."""
    ends = (place for place, token in enumerate(token_ids) if token in stops)
    return token_ids[: next(ends, len(token_ids)) + 1]
