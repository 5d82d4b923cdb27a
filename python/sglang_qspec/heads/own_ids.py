"""Heads with an LM head of their own, which drafts some of the target's ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OwnIds(nn.Module):
    """A head that knows which of the target's ids its LM head drafts."""

    d2t: Tensor
    """Int64 [draft ids]: what to add to each of the head's ids for the target's id."""

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each of the head's ids, int64 [draft ids]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def choose_ids(self, ids: Tensor) -> None:
        """Draft these ids of the target, int64 [draft ids], distinct and in rising order."""
        self.d2t = ids - torch.arange(len(ids), device=ids.device)
