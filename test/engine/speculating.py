"""Makes speculators over the library's fake link, and runs their passes for tests."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.passes.decide.drafts import Drafts
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Commit, Submit
from sglang_qspec.trie import DraftTree, DraftTrees, TrieLimits, TrieStore

VOCAB = 1000
PROMPT = [5, 6, 7]


def counting(submit: Submit) -> Sequence[Sequence[int]]:
    """A list of one completion, which counts up from the last token."""
    last = submit.token_ids[-1]
    return [[last + step for step in range(1, min(submit.max_new_tokens, 20) + 1)]]


def make(
    link: FakeSidecarLink | None,
    clock: Callable[[], float] = time.monotonic,
    *,
    of_head: bool = False,
    has_model: bool = True,
    **settings: Any,
) -> Speculator:
    """A speculator that has not looked for its sidecar yet."""
    limits = TrieLimits(vocab_size=VOCAB, max_request_tokens=256, max_total_tokens=4096)
    config = QSpecConfig(max_request_tokens=256, max_total_tokens=4096, **settings)
    opened = Opened() if link is None else Opened((link,), of_head=of_head, has_model=has_model)
    return Speculator(config, VOCAB, TrieStore(limits), opened, clock)


def connect(
    link: FakeSidecarLink, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> Speculator:
    """A speculator with a sidecar that is ready."""
    active = make(link, clock, **settings)
    poll(active)
    return active


def serve(
    link: FakeSidecarLink, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> Speculator:
    """A speculator with one running request, "a", which has drafts."""
    active = connect(link, clock, **settings)
    enqueue(active)
    poll(active)
    active.admit("a")
    return active


def poll(active: Speculator, times: int = 4) -> None:
    for _ in range(times):
        active.poll()


def enqueue(active: Speculator, rid: str = "a", **changes: object) -> None:
    arguments: dict[str, object] = {
        "prompt_ids": list(PROMPT),
        "output_ids": [],
        "max_new_tokens": 30,
        "stop_token_ids": [2],
    }
    active.enqueue(rid, **{**arguments, **changes})  # type: ignore[arg-type]


def replace_sidecar(active: Speculator, link: FakeSidecarLink) -> None:
    """Lose the sidecar and connect another."""
    link.die()
    poll(active)
    link.revive()
    poll(active)


def tree_of(active: Speculator, rid: str, output_ids: list[int], width: int) -> DraftTree:
    return active.propose([rid], [output_ids], width)[0]


def finish_pass(
    drafts: Drafts,
    rids: Sequence[str],
    trees: DraftTrees,
    accepted: Sequence[Sequence[int]],
    bonus_ids: Sequence[int],
) -> None:
    """Count and commit a pass; the arguments are as in `Drafts.commit`."""
    drafts.count(rids, trees, accepted)
    drafts.commit(rids, trees, accepted, bonus_ids)


def decode(
    active: Speculator, output_ids: list[int], accepted: Sequence[int] = (), bonus_id: int = 0
) -> list[int]:
    """One pass of request "a" that accepts these nodes of its tree. Returns the output after it."""
    trees = active.propose(["a"], [output_ids], 4)
    finish_pass(active, ["a"], trees, [list(accepted)], [bonus_id])
    return [*output_ids, *(trees[0].token_ids[node] for node in accepted), bonus_id]


def commits(link: FakeSidecarLink) -> list[Commit]:
    return [commit for message in link.commits for commit in message.requests]
