"""The target's states are projected for a head, and an error in that ends speculation alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_qspec.engine import speculation
from sglang_qspec.engine.passes.states import ComingStates, TargetStates
from sglang_qspec.heads import checkpoint
from sglang_qspec.policy import PASS_ROWS
from test.engine.speculating import make
from test.heads.tiny import SHAPE, random_head

LAYERS = 3


class Processor(torch.nn.Module):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.got.append((args, kwargs))


class Target(torch.nn.Module):
    """A target with what SGLang's models have for heads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(num_hidden_layers=SHAPE["num_hidden_layers"])
        self.captured: list[int] = []
        self.logits_processor = Processor()

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.captured = layers


@pytest.fixture
def states(tmp_path: Path) -> Iterator[tuple[Target, TargetStates]]:
    checkpoint.save(random_head(), tmp_path, torch.float32)
    target = Target()
    speculation.activate(make(None))
    found = TargetStates.of(target, str(tmp_path), "")
    assert found is not None
    yield target, found
    speculation.deactivate()


def test_the_outputs_of_the_heads_layers_are_projected(
    states: tuple[Target, TargetStates],
) -> None:
    target, found = states
    assert target.captured == [0, 2, 4]
    aux = [torch.randn(5, 64) for _ in range(LAYERS)]
    target.logits_processor("ids", "hidden", "head", "batch", aux)
    taken = found.take(4, replayed=False)
    assert taken is not None
    torch.testing.assert_close(taken, random_head().project(torch.cat(aux, -1))[:4].detach())
    assert found.take(4, replayed=False) is None  # they are those of one pass
    target.logits_processor("ids", "hidden", "head", "batch", aux_hidden_states=aux)
    assert found.take(6, replayed=False) is None  # fewer than the rows
    # SGLang's logits processor does not see them.
    none = {"aux_hidden_states": None}
    assert target.logits_processor.got == [(("ids", "hidden", "head", "batch"), none)] * 2


def test_a_replayed_graph_leaves_its_states_in_memory_that_all_graphs_share(
    states: tuple[Target, TargetStates],
) -> None:
    target, found = states
    captured = torch.randn(PASS_ROWS + 2, LAYERS * 64)  # with two rows of padding
    target.logits_processor("ids", "hidden", "head", "batch", captured)
    wanted = random_head().project(captured).detach()
    found.begin()  # a replay runs no Python
    taken = found.take(PASS_ROWS, replayed=True)
    assert taken is not None
    torch.testing.assert_close(taken, wanted[:PASS_ROWS])
    target.logits_processor("ids", "hidden", "head", "batch", -captured[:2])
    torch.testing.assert_close(taken, wanted[:PASS_ROWS])  # the next pass does not change it
    found.begin()
    assert found.take(PASS_ROWS + 1, replayed=True) is None  # more rows than are kept
    assert found.take(3, replayed=False) is None  # a pass that has kept none


def test_an_error_ends_speculation_alone(states: tuple[Target, TargetStates]) -> None:
    target, found = states
    target.logits_processor("ids", "hidden", "head", "batch", [torch.randn(5, 64)])
    assert speculation.failed()
    assert found.take(5, replayed=False) is None
    assert len(target.logits_processor.got) == 1


def test_each_request_has_its_rows() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    wanted = rows.bfloat16().view(torch.int16).numpy()
    plain = ComingStates(rows, [0, 1], [7, 9])
    assert [(begin, found.tolist()) for begin, found in plain.read([[], []])] == [
        (7, wanted[:1].tolist()),
        (9, wanted[1:2].tolist()),
    ]
    trees = ComingStates(rows, [0, 3], [7, 9])
    assert [found.tolist() for _, found in trees.read([[1, 2], [1]])] == [
        wanted[:3].tolist(),
        wanted[3:5].tolist(),
    ]
    prompts = ComingStates(rows, [0, 2], [0, 4], [2, 4])
    assert [found.tolist() for _, found in prompts.read([[], []])] == [
        wanted[:2].tolist(),
        wanted[2:].tolist(),
    ]
