"""The hidden states of the target's rows, for a head in the sidecar.

SGLang lets a target keep the outputs of some layers for EAGLE-3 heads. They are projected to the
width of the head as the head itself would do it, which makes them several times smaller. EAGLE-2
heads get what the target's LM head reads. The states are copied to the host.

A CUDA graph runs no Python, so its capture includes a copy of the states to memory that all graphs
share. The pass that replays it finds its states there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.heads.checkpoint import load_projection
from sglang_qspec.heads.config import HeadKind, folder_of, read
from sglang_qspec.policy import PASS_ROWS
from sglang_qspec.transfers import HostCopy

LAST, AUX = 1, 4
"""Places of the last states and of the outputs of the layers among the arguments of SGLang's logits
processor; AUX is the last place."""


class TargetStates:
    """Owns the states of the last pass of a target, as the head reads them."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """Let `model`, which `start.checks` has checked, keep the states that a head reads.

        `folder` has the head. Raises ConfigError if it is damaged.
        """
        found: Any = model
        weight = next(model.parameters())
        config = read(folder)
        self._projection: Tensor | None = None
        if config.kind is HeadKind.EAGLE3:
            self._projection = load_projection(folder, weight.dtype, weight.device)
            layers = config.layers_of(int(found.config.num_hidden_layers))
            found.set_eagle3_layers_to_capture(list(layers))
        self._last: Tensor | None = None
        self._of_graph = torch.empty(
            PASS_ROWS, config.hidden_size, dtype=weight.dtype, device=weight.device
        )
        """The states of the first rows of the last pass, where the captured copies are."""
        found.logits_processor.register_forward_pre_hook(self._keep, with_kwargs=True)

    @classmethod
    def of(cls, model: nn.Module, draft_model: str | None, head_path: str) -> TargetStates | None:
        """The states of a target for the head among these; None if there is none."""
        folder = folder_of(draft_model, head_path)
        return None if folder is None else cls(model, folder)

    def _keep(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keep the states of a pass, and hide those of layers from SGLang's logits processor.

        Otherwise a request that asks for hidden states would get them, too.
        """
        given = {**kwargs, "aux_hidden_states": None}
        aux = kwargs.get("aux_hidden_states")
        last = args[LAST] if len(args) > LAST else kwargs.get("hidden_states")
        if len(args) > AUX:
            aux = args[AUX]
            args = args[:AUX] + args[AUX + 1 :]
        if speculation.active() is not None:
            with guarded("keeping hidden states"):
                self._last = self._read(last, aux)
                if self._last is not None:
                    kept = self._of_graph[: len(self._last)]
                    kept.copy_(self._last[: len(kept)])
        return args, given

    def _read(self, last: Any, aux: Any) -> Tensor | None:
        """What the head reads, [rows, width]; None if the pass has not kept it."""
        if self._projection is None:
            return last if isinstance(last, Tensor) else None
        if aux is None:
            return None
        states = aux if isinstance(aux, Tensor) else torch.cat(list(aux), -1)
        return functional.linear(states.to(self._projection.dtype), self._projection)

    def begin(self) -> None:
        """Forget the states of earlier passes, and of captures."""
        self._last = None

    def take(self, rows: int, *, replayed: bool) -> Tensor | None:
        """The states of the first `rows` rows of the pass since `begin`, [rows, width].

        `replayed` says whether a CUDA graph ran the pass, or a part of it. None if the pass has not
        kept them.
        """
        last, self._last = self._last, None
        if last is None and replayed:
            last = self._of_graph[:rows].clone()  # the next pass writes there
        return last[:rows] if last is not None and len(last) >= rows else None


class ComingStates:
    """The states of a pass that may still run; the copy to the host has been started."""

    def __init__(
        self,
        states: Tensor,
        firsts: Sequence[int],
        begins: Sequence[int],
        counts: Sequence[int] | None = None,
    ) -> None:
        """Start the copy of `states`, [rows, width].

        Those of request i begin with row `firsts[i]` and with position `begins[i]` of its text.
        There are `counts[i]` of them; None means one for each accepted node and the root.
        """
        self._copy = HostCopy(states.to(torch.bfloat16).view(torch.int16))
        self._firsts, self._begins, self._counts = firsts, begins, counts

    def read(self, accepted: Sequence[Sequence[int]]) -> Iterator[tuple[int, NDArray[np.int16]]]:
        """The position and the states of each request, bfloat16 as int16 [tokens, width].

        `accepted` has the accepted nodes of each tree. Waits for the pass.
        """
        states = self._copy.read()
        counts = self._counts or [1 + len(nodes) for nodes in accepted]
        for first, begin, count in zip(self._firsts, self._begins, counts, strict=True):
            yield begin, states[first : first + count]
