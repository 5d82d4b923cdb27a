"""A decoder whose layers can be left out, run by transformers over fixed texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from sglang_qspec.errors import QSpecError

TOLERANCE, COARSE_TOLERANCE = 1e-3, 5e-2
"""Largest difference of two logits, relative to the largest one, that counts as rounding: in
float32, and in 16 bits."""


class Fit(NamedTuple):
    """How well some of the layers reproduce all of them, along the answers of all."""

    overlap: float
    """Mean over the tokens of the sum of min(p, q): the chance that rejection sampling accepts a
    draft token at temperature 1. `p` are the probabilities with all layers, `q` with some."""
    agreement: float
    """Share of tokens at which both have the same arg max."""


def _load(path: Path) -> Any:
    on_gpu = torch.cuda.is_available()
    dtype: Any = "auto" if on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to("cuda" if on_gpu else "cpu").eval()


class Decoder:
    """A model and the texts by which its layers are judged: prompts with its own greedy answers.

    The states before each layer are kept, so a layer can be left out without running those before
    it again.
    """

    def __init__(self, path: Path) -> None:
        """Load the model: in float32 on a CPU, which has slow kernels for other types.

        Raises QSpecError if it has no list of decoder layers.
        """
        self._model = _load(path)
        inner: Any = getattr(self._model, "model", None)
        if not hasattr(inner, "layers") or not hasattr(inner, "norm"):
            raise QSpecError(
                f"{path} is a {type(self._model).__name__}, but only decoders with `model.layers` "
                "and `model.norm` can do without layers"
            )
        self._layers = list(inner.layers)
        self._norm = inner.norm

    def __len__(self) -> int:
        return len(self._layers)

    def answer(self, prompt_ids: list[int], tokens: int) -> list[int]:
        """The greedy answer of at most `tokens` tokens."""
        prompt = torch.tensor([prompt_ids], device=self._model.device)
        with torch.inference_mode():
            found = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return found[0, len(prompt_ids) :].tolist()

    def read(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Run all layers over the texts, and keep the results to compare others with.

        Raises QSpecError if the layers cannot be run by themselves.
        """
        longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        places = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            places[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
        self._ids, self._places = ids.to(self._model.device), places.to(self._model.device)
        self._calls: list[tuple[torch.Tensor, dict[str, Any]]] = []
        hooks = [
            layer.register_forward_pre_hook(self._record, with_kwargs=True)
            for layer in self._layers
        ]
        with torch.inference_mode():
            # Padding follows the texts, so causal attention hides it without a mask.
            logits = self._model(self._ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        self._all = torch.softmax(logits[self._places].float(), -1)
        if not self._equal(self.logits(range(len(self))), logits[self._places].float()):
            raise QSpecError(
                f"the layers of a {type(self._model).__name__} cannot be run by themselves"
            )

    def is_written(self, path: Path, logits: torch.Tensor) -> bool:
        """Whether the checkpoint at `path` gives these `logits` for the texts."""
        with torch.inference_mode():
            found = _load(path)(self._ids, use_cache=False).logits[self._places]
        return self._equal(found.float(), logits)

    def _equal(self, found: torch.Tensor, logits: torch.Tensor) -> bool:
        is_exact = self._model.dtype == torch.float32
        limit = (TOLERANCE if is_exact else COARSE_TOLERANCE) * float(logits.abs().max())
        return bool((found - logits).abs().max() <= limit)

    def _record(self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(kwargs)
        hidden = args[0] if args else given.pop("hidden_states")
        self._calls.append((hidden, given))

    def states(self, kept: Sequence[int]) -> list[torch.Tensor]:
        """The hidden states before each of the layers `kept`, [texts, tokens, hidden]."""
        states = [self._calls[0][0]]
        with torch.inference_mode():
            for layer in kept[:-1]:
                states.append(self._run(layer, states[-1]))
        return states

    def logits(self, kept: Sequence[int], state: torch.Tensor | None = None) -> torch.Tensor:
        """Logits float [answer tokens, vocab] after the layers `kept`, run from `state` on.

        By default the first layer reads the embeddings.
        """
        hidden = self._calls[0][0] if state is None else state
        with torch.inference_mode():
            for layer in kept:
                hidden = self._run(layer, hidden)
            found = self._model.lm_head(self._norm(hidden[self._places])).float()
            cap = getattr(self._model.config, "final_logit_softcapping", None)
            return found if cap is None else cap * torch.tanh(found / cap)

    def fit(self, logits: torch.Tensor) -> Fit:
        """How well `logits`, float [answer tokens, vocab], fit those of all layers."""
        probs = torch.softmax(logits, -1)
        overlap = torch.minimum(probs, self._all).sum(-1).mean()
        same = probs.argmax(-1) == self._all.argmax(-1)
        return Fit(float(overlap), float(same.float().mean()))

    def _run(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        found = self._layers[layer](hidden, **self._calls[layer][1])
        return found[0] if isinstance(found, tuple) else found
