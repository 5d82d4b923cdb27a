"""A head in a folder, a text with its states, and what the head drafts behind them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.checkpoint import AnyHead
from sglang_qspec.heads.config import HeadKind
from sglang_qspec.heads.hydra import HydraHead
from sglang_qspec.heads.medusa import MedusaHeads
from sglang_qspec.link import Peer
from sglang_qspec.sidecar import service
from sglang_qspec.sidecar.head_runner import HeadRunner
from sglang_qspec.sidecar.options import parser
from test.heads.tiny import (
    VOCAB,
    Drafting,
    random_eagle2,
    random_head,
    random_hydra,
    random_medusa,
    write_target,
)

PEER = Peer("server", b"1", VOCAB)
WIDTH = 64
TEXT = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()
STATES = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(6)).bfloat16()


def written(folder: Path, kind: HeadKind) -> tuple[Path, Path]:
    """Folders of a head of this kind and its target."""
    made: dict[HeadKind, Callable[[], AnyHead]] = {
        HeadKind.EAGLE3: random_head,
        HeadKind.EAGLE2: random_eagle2,
        HeadKind.MEDUSA: random_medusa,
        HeadKind.HYDRA: random_hydra,
    }
    (folder / "head").mkdir()
    checkpoint.save(made[kind](), folder / "head", torch.float32)
    return folder / "head", write_target(folder / "target")


def load(folders: tuple[Path, Path], kv_slots: int = 300) -> HeadRunner:
    """Load the head as a sidecar does."""
    given = [f"--model-path={folders[0]}", f"--target-path={folders[1]}", "--endpoint=ipc:///tmp/x"]
    limits = [f"--max-total-tokens={kv_slots}", "--slots=4", "--context-length=64"]
    model, _ = service._models(parser().parse_args([*given, *limits]), "cpu")
    assert isinstance(model, HeadRunner)
    return model


def choices_of(
    reference: tuple[AnyHead, torch.Tensor], length: int, count: int, begin: int = 0
) -> list[list[int]]:
    """The greedy draft of `count` tokens behind the first `length` tokens of TEXT.

    Each has the likeliest token and the second likeliest. The head has the states from `begin` on.
    """
    head, embedding = reference
    if isinstance(head, MedusaHeads):
        with torch.inference_mode():
            newest = STATES[length - 2].float()
            drafted = [head.logits(head.output(newest, number), number) for number in range(count)]
        return [logits.topk(2).indices.tolist() for logits in drafted]
    if isinstance(head, HydraHead):
        return _hydra_choices(head, embedding, length, count)
    drafting = Drafting(head, embedding)
    found: list[list[int]] = []
    with torch.inference_mode():
        for place in range(begin, length - 1):
            output = drafting.row(TEXT[place + 1], STATES[place].float())
        while True:
            found.append(head.target_ids[head.logits(output).topk(2).indices].tolist())
            if len(found) == count:
                return found
            output = drafting.row(found[-1][0], output)


def _hydra_choices(
    head: HydraHead, embedding: torch.Tensor, length: int, count: int
) -> list[list[int]]:
    found: list[list[int]] = []
    token, state = TEXT[length - 1], STATES[length - 2].float()
    with torch.inference_mode():
        for _ in range(count):
            state = head.output(embedding[token], state)
            found.append(head.target_ids[head.logits(state).topk(2).indices].tolist())
            token = found[-1][0]
    return found


def drafts_of(
    reference: tuple[AnyHead, torch.Tensor], length: int, count: int, begin: int = 0
) -> list[int]:
    """The likeliest tokens of `choices_of`."""
    return [first for first, _ in choices_of(reference, length, count, begin)]
