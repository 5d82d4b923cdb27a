"""Checks draft trees on a device against the CPU: transfers, masks, SGLang's kernels, KV rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_qspec.cpu import kernels as on_cpu
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.trie import DraftTree, DraftTrees, Source

WIDTHS = (1, 2, 8, 13)


def staging(device: torch.device) -> None:
    """Arrays keep values, types and shapes in the transfer."""
    from sglang_qspec.engine.passes.transfers import to_device

    arrays = (
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.array([True, False, True]),
        np.zeros((2, 0), np.int64),
        np.array([[2**60], [-5]]),
        np.array([0.5, -1.5], np.float32),
    )
    for array, tensor in zip(arrays, to_device(device, *arrays), strict=True):
        assert tensor.device.type == device.type
        expected = torch.from_numpy(array)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.cpu(), expected)


def verify_input(device: torch.device) -> None:
    """The tensors of a pass over trees of one width, with and without the prefix, and ragged."""
    from sglang_qspec.engine.passes.launch.verify_input import verify_input_of

    names = ["draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token"]
    names += ["retrieve_next_sibling", "tree_mask", "owners", "offsets", "input_ids"]
    lengths = torch.arange(9) * 31 + 1
    for trees in _batches(9):
        for full_mask in (True, False):
            found = verify_input_of(trees, lengths.to(device), device, full_mask=full_mask)
            expected = verify_input_of(trees, lengths, "cpu", full_mask=full_mask)
            for name in names:
                ours, theirs = getattr(found, name), getattr(expected, name)
                assert ours.device.type == device.type, name
                assert torch.equal(ours.cpu(), theirs), f"{name} differs at width {trees.width}"


def accept(device: torch.device) -> str:
    """SGLang's kernel and our code for CPUs accept the same nodes; on a CPU both are our code."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    accepted = 0
    for count in (1, 60):
        for trees in _batches(count):
            given = _to_accept(trees)
            expected, found = _buffers(trees), _buffers(trees)
            on_cpu.verify_tree_greedy_cpu(
                **expected,
                candidates=given["candidates"],
                retrive_index=given["retrieve_index"],
                retrive_next_token=given["retrieve_next_token"],
                retrive_next_sibling=given["retrieve_next_sibling"],
                target_predict=given["target_predict"],
            )
            moved = {name: values.to(device) for name, values in found.items()}
            inputs = {name: values.to(device) for name, values in given.items()}
            verify_tree_greedy_func(**moved, **inputs)
            places = expected["accept_index"].flatten()
            places = places[places >= 0].long()
            kind = f"width {trees.width}{', ragged' if trees.ragged else ''}"
            for name in ("accept_index", "accept_token_num"):
                assert torch.equal(moved[name].cpu(), expected[name]), f"{name}, {kind}"
            # Only the tokens of accepted nodes have a meaning.
            tokens = moved["predicts"].cpu()[places]
            assert torch.equal(tokens, expected["predicts"][places]), f"predicts, {kind}"
            accepted += int(expected["accept_token_num"].sum())
    assert accepted > 200
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


def _batches(count: int) -> Iterator[DraftTrees]:
    """Trees of each of WIDTHS, of one width and ragged."""
    for width in WIDTHS:
        trees = DraftTrees.of([_tree(number, width) for number in range(count)], width)
        yield trees
        yield trees.cut(1 + np.arange(count, dtype=np.int64) % width)


def _to_accept(trees: DraftTrees) -> dict[str, Tensor]:
    """The inputs of SGLang's kernel in a pass over the trees; the target often agrees with a child.

    The inputs are as in `passes.sample`: the kernel reads the target's tokens at the rows of
    `retrieve_index`.
    """
    from sglang_qspec.engine.passes.launch.verify_input import verify_input_of

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


def _buffers(trees: DraftTrees) -> dict[str, Tensor]:
    count, width = len(trees), trees.width
    return {
        "predicts": torch.zeros(count * width, dtype=torch.int32),
        "accept_index": torch.full((count, width), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(count, dtype=torch.int32),
    }


class _Pool:
    """A KV pool with slots in order."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._free = torch.arange(1, 1 + size, device=device)

    def alloc(self, need_size: int) -> Tensor:
        taken, self._free = self._free[:need_size], self._free[need_size:]
        return taken

    def free(self, free_index: Tensor) -> None:
        self._free = torch.cat((self._free, free_index))

    def available_size(self) -> int:
        return len(self._free)


def _grown(device: torch.device) -> Tensor:
    """The table of rows after some operations, on the CPU."""
    table = torch.zeros(9, 40, dtype=torch.int32, device=device)
    rows = KVRows(table, 40, _Pool(199, device))
    first, second = rows.open(), rows.open()
    rows.append([first, second], [12, 7])
    third = rows.fork(first, 9)
    rows.append_one([first, second, third])
    rows.truncate(first, 5)
    rows.close(second)
    rows.append([third], [4])
    rows.check_integrity()
    return torch.stack([table[row].cpu() for row in (first, third)])
