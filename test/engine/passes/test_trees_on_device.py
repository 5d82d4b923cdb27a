"""Draft trees on a device equal those on the CPU: masks, SGLang's tree kernels, KV rows.

`scripts/gpu-check` runs these tests on a GPU (`--device cuda`), where SGLang's kernels run beside
our code for CPUs. On a CPU both are our code, which test/cpu/test_kernels.py compares with loops.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_qspec.cpu import kernels as on_cpu
from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.transfers import to_device
from sglang_qspec.trie import DraftTrees
from test.trees import random_tree

WIDTHS = (1, 2, 8, 13)
CPU = torch.device("cpu")


def trees_of(count: int, width: int) -> DraftTrees:
    """Trees of `width` nodes or fewer."""
    rng = random.Random(f"{count} {width}")
    return DraftTrees.of([random_tree(rng, rng.randint(1, width)) for _ in range(count)], width)


def batches(count: int) -> Iterator[DraftTrees]:
    """Trees of each of WIDTHS, of one width and ragged."""
    for width in WIDTHS:
        trees = trees_of(count, width)
        yield trees
        yield trees.cut(1 + np.arange(count, dtype=np.int64) % width)


@pytest.mark.parametrize("full_mask", [True, False])
def test_the_tensors_of_a_pass_are_those_of_the_cpu(full_mask: bool, device: torch.device) -> None:
    names = ["draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token"]
    names += ["retrieve_next_sibling", "tree_mask", "owners", "offsets", "input_ids"]
    lengths = torch.arange(9) * 31 + 1
    for trees in batches(9):
        found = verify_input_of(trees, lengths.to(device), device, full_mask=full_mask)
        expected = verify_input_of(trees, lengths, "cpu", full_mask=full_mask)
        for name in names:
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours.device.type == device.type, name
            assert torch.equal(ours.cpu(), theirs), f"{name} differs at width {trees.width}"


def test_sglangs_kernel_accepts_the_nodes_that_our_code_accepts(device: torch.device) -> None:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    accepted = 0
    for trees in (each for count in (1, 60) for each in batches(count)):
        given, expected = to_accept(trees), buffers(trees)
        renamed = {name.replace("retrieve", "retrive"): each for name, each in given.items()}
        on_cpu.verify_tree_greedy_cpu(**expected, **renamed)
        found = {name: values.to(device) for name, values in buffers(trees).items()}
        verify_tree_greedy_func(
            **found, **{name: values.to(device) for name, values in given.items()}
        )
        places = expected["accept_index"].flatten()
        places = places[places >= 0].long()
        kind = f"width {trees.width}{', ragged' if trees.ragged else ''}"
        for name in ("accept_index", "accept_token_num"):
            assert torch.equal(found[name].cpu(), expected[name]), f"{name}, {kind}"
        # Only the tokens of accepted nodes have a meaning.
        tokens = found["predicts"].cpu()[places]
        assert torch.equal(tokens, expected["predicts"][places]), f"predicts, {kind}"
        accepted += int(expected["accept_token_num"].sum())
    assert accepted > 200


def to_accept(trees: DraftTrees) -> dict[str, Tensor]:
    """The inputs of SGLang's kernel in a pass over the trees; the target often agrees with a child.

    The inputs are as in `passes.sample`: the kernel reads the target's tokens at the rows of
    `retrieve_index`.
    """
    given = verify_input_of(trees, torch.zeros(len(trees)).long(), "cpu", full_mask=False)
    candidates = given.draft_token.view(len(trees), trees.width)
    child = given.retrieve_next_token[given.owners, given.offsets]
    sibling = given.retrieve_next_sibling[given.owners, child.clamp(min=0)]
    kind = torch.randint(4, child.shape, generator=torch.Generator().manual_seed(trees.width))
    # The first child, another child, or neither.
    chosen = torch.where((kind == 1) & (sibling >= 0), sibling, child)
    drawn = candidates[given.owners, chosen.clamp(min=0)]
    drawn = torch.where((kind == 0) | (child < 0), 7, drawn)
    targets = pad(drawn, (0, candidates.numel() - len(drawn)))
    return {
        "candidates": candidates,
        "retrieve_index": given.retrieve_index,
        "retrieve_next_token": given.retrieve_next_token,
        "retrieve_next_sibling": given.retrieve_next_sibling,
        "target_predict": targets.view_as(candidates),
    }


def buffers(trees: DraftTrees) -> dict[str, Tensor]:
    count, width = len(trees), trees.width
    return {
        "predicts": torch.zeros(count * width, dtype=torch.int32),
        "accept_index": torch.full((count, width), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(count, dtype=torch.int32),
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_sglangs_kernel_derives_the_links_that_our_code_derives(
    width: int, device: torch.device
) -> None:
    from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask

    mask = torch.from_numpy(trees_of(9, width).lay_out().mask).flatten()
    lengths = torch.arange(9) + 10

    def derived(place: torch.device, derive: Callable[..., None]) -> list[Tensor]:
        # Positions are flat, and the three links have a line for each request.
        shapes = [(9 * width,), *[(9, width)] * 3]
        out = [torch.zeros(shape, dtype=torch.int64, device=place) for shape in shapes]
        derive(mask.to(place), lengths.to(place), *out, 9, width)
        return [values.cpu() for values in out]

    ours = derived(CPU, on_cpu.reconstruct_indices_from_tree_mask)
    for own, theirs in zip(ours, derived(device, reconstruct_indices_from_tree_mask), strict=True):
        assert torch.equal(own, theirs)


def test_the_rows_of_the_sidecars_kv_hold_the_slots_that_they_hold_on_the_cpu(
    device: torch.device,
) -> None:
    assert torch.equal(grown(CPU), grown(device))


def grown(device: torch.device) -> Tensor:
    """The table of rows after some operations, on the CPU."""
    table = torch.zeros(9, 40, dtype=torch.int32, device=device)
    rows = KVRows(table, 40, np.arange(1, 200))

    def append(counts: dict[int, int]) -> None:
        rows.place(*to_device(device, *rows.append(list(counts), list(counts.values()))))

    first, second = rows.open(), rows.open()
    append({first: 12, second: 7})
    third = rows.fork(first, 9)
    append({first: 1, second: 1, third: 1})
    rows.truncate(first, 5)
    rows.close(second)
    append({third: 4})
    rows.check_integrity()
    return torch.stack([table[row].cpu() for row in (first, third)])
