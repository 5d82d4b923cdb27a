"""A new head: the ids that it drafts, and its first weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_qspec.heads.checkpoint import AnyHead
from sglang_qspec.heads.config import HeadConfig, HeadKind
from sglang_qspec.heads.hydra import HydraHead
from sglang_qspec.heads.medusa import MedusaHeads
from sglang_qspec.heads.model import Eagle2Head, Head
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


def new_head(config: HeadConfig, ids: Tensor, target: TargetModel) -> AnyHead:
    """A head with random weights, but for the last norm and the LM head, which are the target's.

    EAGLE-3 and Hydra heads draft `ids`, int64 [draft ids] in rising order. An EAGLE-2 head drafts
    all ids, and begins with an output near the state that it reads: it has no norm that would give
    its output the size of the target's states. Medusa heads begin as copies of the target's LM
    head. A Hydra head begins with the state that it reads as its output.
    """
    if config.kind is HeadKind.MEDUSA:
        medusa = MedusaHeads(config).to(target.device)
        with torch.no_grad():
            for weight in medusa.blocks.parameters():
                weight.zero_()
            for weight in medusa.lm_heads.parameters():
                weight.copy_(target.lm_head)
        return medusa
    if config.kind is HeadKind.EAGLE2:
        eagle2 = Eagle2Head(config).to(target.device)
        eagle2.lm_head = target.lm_head.detach()
        with torch.no_grad():
            eagle2.fc.weight[:, config.hidden_size :].copy_(torch.eye(config.hidden_size))
        return eagle2
    if config.kind is HeadKind.HYDRA:
        hydra = HydraHead(config).to(target.device)
        hydra.choose_ids(ids.to(target.device))
        with torch.no_grad():
            hydra.down.weight.zero_()
            hydra.lm_head.weight.copy_(target.lm_head[hydra.target_ids])
            # Its states have the target's last norm, and their mean square is about this one.
            hydra.norm.weight.fill_(target.norm.float().square().mean().sqrt())
        return hydra
    head = Head(config).to(target.device)
    head.choose_ids(ids.to(target.device))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head[head.target_ids])
        head.norm.weight.copy_(target.norm)
    return head
