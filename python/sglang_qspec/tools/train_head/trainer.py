"""Trains a head step by step, and keeps what a killed command needs to go on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_qspec.heads.checkpoint import AnyHead
from sglang_qspec.tools.train_head.target import TargetModel, WrittenText
from sglang_qspec.tools.train_head.training import PaddedTexts, Teacher, loss

RATE = 1e-3
"""Highest learning rate."""
WARM_UP = 0.05
"""Share of the steps in which the learning rate rises."""
LONGEST_GRADIENT = 1.0
"""Norm above which gradients are shortened."""
KEEP_S = 60.0
"""Seconds between two times at which the state is written."""


class Trainer:
    """A head, its optimizer, and the order of the texts."""

    def __init__(
        self,
        head: AnyHead,
        target: TargetModel,
        texts: Sequence[WrittenText],
        *,
        layers: Sequence[int],
        epochs: int,
        depth: int,
        batch_tokens: int,
        seed: int,
    ) -> None:
        """`depth` tokens are drafted in a row, and a step has at most `batch_tokens` tokens."""
        self.head, self._target, self._texts = head, target, texts
        self._teacher = Teacher(target, head)
        self._layers, self._depth = layers, depth
        self._batch_tokens, self._seed = batch_tokens, seed
        self._epochs = epochs
        self.steps = sum(len(list(self._batches(epoch))) for epoch in range(epochs))
        self._done = 0
        betas, decay = (0.9, 0.95), 0.0
        self._optimizer = torch.optim.AdamW(head.parameters(), RATE, betas, weight_decay=decay)

    def run(self, kept: Path) -> None:
        """Make the steps that are left, and write the state to the file `kept` now and then."""
        from tqdm import tqdm

        self._go_on(kept)
        written = time.monotonic()
        batches = (batch for epoch in range(self._epochs) for batch in self._batches(epoch))
        with tqdm(total=self.steps, initial=self._done, desc="training") as progress:
            for number, texts in enumerate(batches):
                if number < self._done:
                    continue
                value = self._step(texts)
                self._done += 1
                progress.update()
                progress.set_postfix_str(f"loss {value:.3f}", refresh=False)
                if time.monotonic() - written > KEEP_S:
                    self._keep(kept)
                    written = time.monotonic()
        self._keep(kept)

    def _step(self, texts: Sequence[WrittenText]) -> float:
        """One step; returns its loss."""
        self.head.train()
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * _factor(self._done / self.steps)
        batch = PaddedTexts.of(texts, self._target.device)
        with mixed_precision(self._target):
            value = loss(self.head, self._teacher, self._target, batch, self._layers, self._depth)
        self._optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), LONGEST_GRADIENT)
        self._optimizer.step()
        return value.item()

    def _batches(self, epoch: int) -> Iterator[list[WrittenText]]:
        """The texts of an epoch in random order, those of a step of similar lengths."""
        rng = random.Random(self._seed + epoch)
        texts = sorted(self._texts, key=lambda text: len(text.token_ids) + 16 * rng.random())
        found: list[list[WrittenText]] = [[]]
        for text in texts:
            if (len(found[-1]) + 1) * len(text.token_ids) > self._batch_tokens and found[-1]:
                found.append([])
            found[-1].append(text)
        rng.shuffle(found)
        return iter(found)

    def _keep(self, path: Path) -> None:
        state = {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "done": self._done,
        }
        new = path.with_suffix(".new")
        torch.save(state, new)
        new.rename(path)

    def _go_on(self, path: Path) -> None:
        if not path.exists():
            return
        state: dict[str, Any] = torch.load(path, self._target.device, weights_only=True)
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._done = state["done"]


def mixed_precision(target: TargetModel) -> torch.autocast:
    """Products in 16 bits, if the target computes in 16 bits."""
    return torch.autocast(target.device.type, torch.bfloat16, enabled=target.is_fast)


def _factor(done: float) -> float:
    """The learning rate over the highest one, when a share of the steps is done."""
    if done < WARM_UP:
        return (done + 1e-3) / (WARM_UP + 1e-3)
    return 0.5 * (1.0 + math.cos(math.pi * (done - WARM_UP) / (1.0 - WARM_UP)))
