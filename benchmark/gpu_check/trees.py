"""Draft trees on a device: transfers, masks, SGLang's kernels, and KV rows, against the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sglang_qspec.cpu import kernels as on_cpu
from sglang_qspec.cpu.tree_links import links_from_parents
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.trie import DraftTree, DraftTrees, Source

WIDTHS = (1, 2, 8, 13)


def staging(device: torch.device) -> None:
    """Arrays keep values, types and shapes in the transfer."""
    from sglang_qspec.engine.passes.staging import stage

    arrays = (
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.array([True, False, True]),
        np.zeros((2, 0), np.int64),
        np.array([[2**60], [-5]]),
        np.array([0.5, -1.5], np.float32),
    )
    for array, tensor in zip(arrays, stage(device, *arrays), strict=True):
        assert tensor.device.type == device.type
        expected = torch.from_numpy(array)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.cpu(), expected)


def verify_input(device: torch.device) -> None:
    """The tensors of a verify pass, with and without the prefix in the mask."""
    from sglang_qspec.engine.passes.verify_input import verify_input_of

    names = ["draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token"]
    names += ["retrieve_next_sibling", "tree_mask"]
    for width in WIDTHS:
        trees = DraftTrees.of([_tree(number, width) for number in range(9)], width)
        lengths = torch.arange(9) * 31 + 1
        for full_mask in (True, False):
            found = verify_input_of(trees, lengths.to(device), device, full_mask=full_mask)
            expected = verify_input_of(trees, lengths, "cpu", full_mask=full_mask)
            for name in names:
                ours, theirs = getattr(found, name), getattr(expected, name)
                assert ours.device.type == device.type, name
                assert torch.equal(ours.cpu(), theirs), f"{name} differs at width {width}"


def accept(device: torch.device) -> str:
    """SGLang's kernel accepts what our code for CPUs accepts; on a CPU it is that code."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    accepted = 0
    for width in WIDTHS:
        for count in (1, 60):
            given = _to_accept(count, width)
            expected, found = _buffers(count, width), _buffers(count, width)
            inputs = dict(zip(("retrive_index", *_LINKS), given[1:4], strict=True))
            on_cpu.verify_tree_greedy_cpu(
                **expected, candidates=given[0], target_predict=given[4], **inputs
            )
            moved = {name: values.to(device) for name, values in found.items()}
            candidates, index, child, sibling, targets = (each.to(device) for each in given)
            verify_tree_greedy_func(
                **moved,
                candidates=candidates,
                retrieve_index=index,
                retrieve_next_token=child,
                retrieve_next_sibling=sibling,
                target_predict=targets,
            )
            places = expected["accept_index"].flatten()
            places = places[places >= 0].long()
            for name in ("accept_index", "accept_token_num"):
                assert torch.equal(moved[name].cpu(), expected[name]), f"{name}, width {width}"
            # Only the tokens of accepted nodes have a meaning.
            tokens = moved["predicts"].cpu()[places]
            assert torch.equal(tokens, expected["predicts"][places]), f"predicts, width {width}"
            accepted += int(expected["accept_token_num"].sum())
    assert accepted > 50
    return f"{accepted} draft tokens accepted"


def links(device: torch.device) -> None:
    """SGLang's kernel derives the links of a tree from its mask as our code for CPUs does."""
    from sglang.kernels.ops.speculative.reconstruct_tree import reconstruct_indices_from_tree_mask

    for width in WIDTHS:
        trees = DraftTrees.of([_tree(number, width) for number in range(9)], width)
        mask = torch.from_numpy(trees.lay_out().mask).flatten()
        lengths = torch.arange(9) + 10
        results = []
        both: tuple[tuple[torch.device, Callable[..., None]], ...] = (
            (torch.device("cpu"), on_cpu.reconstruct_indices_from_tree_mask),
            (device, reconstruct_indices_from_tree_mask),
        )
        for place, derive in both:
            out = [torch.zeros(9 * width, dtype=torch.int64, device=place) for _ in range(4)]
            derive(mask.to(place), lengths.to(place), *out, 9, width)
            results.append([values.cpu() for values in out])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs), f"width {width}"


def kv_rows(device: torch.device) -> None:
    """The rows of the sidecar's KV hold the same slots after the same operations."""
    tables = [_grown(place) for place in (torch.device("cpu"), device)]
    assert torch.equal(*tables)


_LINKS = ("retrive_next_token", "retrive_next_sibling")
"""SGLang's spelling."""


def _tree(number: int, width: int) -> DraftTree:
    """A tree of `width` nodes or fewer; siblings have different tokens."""
    rng = random.Random(f"{number} {width}")
    size = rng.randint(1, width)
    return DraftTree(
        tuple(range(100, 100 + size)),
        (0, *(rng.randrange(node) for node in range(1, size))),
        (Source.QUEUE,) * size,
        tuple(1.0 / (1 + node) for node in range(size)),
    )


def _to_accept(count: int, width: int) -> list[Tensor]:
    """Draft tokens, indices, links and the target's tokens [count, width] of random trees."""
    generator = torch.Generator().manual_seed(width)
    parents = torch.zeros(count, width, dtype=torch.int64)
    for node in range(1, width):
        parents[:, node] = torch.randint(0, node, (count,), generator=generator)
    child, sibling = links_from_parents(parents)
    tokens, targets = (torch.randint(0, 3, (count, width), generator=generator) for _ in range(2))
    index = torch.arange(count * width).view(count, width)
    return [tokens, index, child, sibling, targets]


def _buffers(count: int, width: int) -> dict[str, Tensor]:
    return {
        "predicts": torch.zeros(count * width, dtype=torch.int32),
        "accept_index": torch.full((count, width), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(count, dtype=torch.int32),
    }


def _grown(device: torch.device) -> Tensor:
    """The table of rows after some operations, on the CPU."""
    free = torch.arange(1, 200, device=device)
    pool = [free]

    def allocate(count: int) -> Tensor:
        taken, pool[0] = pool[0][:count], pool[0][count:]
        return taken

    def give_back(slots: Tensor) -> None:
        pool[0] = torch.cat((pool[0], slots))

    table = torch.zeros(9, 40, dtype=torch.int32, device=device)
    rows = KVRows(table, 40, 200, allocate, give_back, 199)
    first, second = rows.open(), rows.open()
    rows.append([first, second], [12, 7])
    third = rows.fork(first, 9)
    rows.append_one([first, second, third])
    rows.truncate(first, 5)
    rows.close(second)
    rows.append([third], [4])
    rows.check_integrity()
    return torch.stack([table[row].cpu() for row in (first, third)])
