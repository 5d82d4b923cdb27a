"""A new head: the ids that it drafts, and its first weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_qspec.heads.config import HeadConfig
from sglang_qspec.heads.model import Head
from sglang_qspec.tools.train_head.target import TargetModel, WrittenText


def frequent_ids(texts: Sequence[WrittenText], number: int) -> Tensor:
    """The ids that answers have most often, int64 [number] in rising order.

    If they have fewer ids, the lowest ones are added: tokenizers give them to frequent tokens.
    """
    counts = Counter(token for text in texts for token in text.answer)
    ids = {token for token, _ in counts.most_common(number)}
    for token in range(number):
        if len(ids) == number:
            break
        ids.add(token)
    return torch.tensor(sorted(ids), dtype=torch.int64)


def new_head(config: HeadConfig, ids: Tensor, target: TargetModel) -> Head:
    """A head that drafts `ids`, int64 [draft ids] in rising order.

    Its last norm and its LM head are the target's; everything else is random.
    """
    head = Head(config).to(target.device)
    head.choose_ids(ids.to(target.device))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head[head.target_ids])
        head.norm.weight.copy_(target.norm)
    return head
