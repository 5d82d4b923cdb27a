"""The ranks of one tensor-parallel target, which must run the same passes.

Rank 0 decides each decode pass: it alone has the sidecar, the tries and the policies. It sends a
`PassOrder` to the other ranks over the group of their host processes. Before a pass with drafts all
ranks vote whether they have built its input. A vote against makes the pass plain on all ranks, so a
failure never leaves ranks in different kinds of passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sglang_qspec.engine.ranks.order import PassOrder, decode, encode, size_of

FRAME = 8192
"""Bytes of the first message of an order. Most orders fit; the rest of a larger one follows in a
second message."""


class RankGroup:
    """This process's place in the group; a single rank sends nothing."""

    def __init__(self, group: Any = None) -> None:
        """`group` is SGLang's `GroupCoordinator` of the tensor-parallel ranks; None for one."""
        self.rank: int = 0 if group is None else group.rank_in_group
        self.size: int = 1 if group is None else group.world_size
        self._sends = True
        """Whether rank 0 sends orders in the present round."""
        self._ended = False
        """Whether all ranks know that speculation has ended."""
        if self.size > 1:
            self._group, self._leader = group.cpu_group, group.ranks[0]
        self._frame = torch.zeros(FRAME, dtype=torch.uint8)

    @property
    def speculates(self) -> bool:
        """Whether speculation goes on; equal on all ranks between two rounds."""
        return not self._ended

    def begin_round(self) -> bool:
        """Begin a decode round. Returns whether rank 0 sends an order for each of its passes."""
        self._sends = self.size > 1 and not self._ended
        return self._sends

    def choose(self, *, chosen: bool) -> bool:
        """Rank 0's choice, equal on all ranks; the other ranks' `chosen` does not count.

        The other ranks wait for rank 0's host, and no rank waits for its device.
        """
        if self.size > 1:
            choice = torch.tensor([chosen], dtype=torch.uint8)
            self._broadcast(choice)
            chosen = bool(choice.item())
        return chosen

    def send(self, order: PassOrder) -> None:
        """On rank 0: send the order of a pass to the other ranks."""
        if not self._sends:
            return
        data = torch.from_numpy(encode(order))
        first = min(len(data), FRAME)
        self._frame[:first] = data[:first]
        self._broadcast(self._frame)
        if len(data) > FRAME:
            self._broadcast(data[FRAME:].contiguous())
        self._note(order)

    def receive(self) -> PassOrder:
        """On the other ranks: wait for the order of a pass."""
        self._broadcast(self._frame)
        data = self._frame
        rest = size_of(data.numpy()) - FRAME
        if rest > 0:
            more = torch.empty(rest, dtype=torch.uint8)
            self._broadcast(more)
            data = torch.cat((data, more))
        order = decode(np.ascontiguousarray(data.numpy()))
        self._note(order)
        return order

    def dissenter(self, *, agrees: bool) -> int | None:
        """Vote on a pass with drafts. Returns the first rank that does not agree, or None.

        After a vote against the pass, rank 0 sends orders only until the end of the round.
        """
        if self.size == 1:
            return None if agrees else 0
        vote = torch.tensor([self.size if agrees else self.rank], dtype=torch.int32)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        first = int(vote.item())
        if first == self.size:
            return None
        self._ended = True
        return first

    def _note(self, order: PassOrder) -> None:
        self._ended = self._ended or not order.speculates

    def _broadcast(self, data: torch.Tensor) -> None:
        dist.broadcast(data, src=self._leader, group=self._group)
