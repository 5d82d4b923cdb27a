"""A sidecar that lies about its load, or whose drafts are of no use, does not draw the requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.link.fake import no_drafts
from sglang_qspec.messages import Heartbeat, Submit
from test.engine.sidecar.sidecar_fleet import Fleet
from test.engine.speculating import VOCAB, enqueue, finish_pass, poll

SECONDS = 0.01
"""Time of an honest step pass."""
RUNNING = 8
"""Requests that are live at the same time."""
PASSES = 6
NEVER = 10**6
"""Polls after which drafts are too late for any request."""


def junk(submit: Submit) -> Sequence[Sequence[int]]:
    """A completion without a right token; `Fleet` and `serve` count up."""
    return [[VOCAB - 1 - step for step in range(20)]]


def honest(link: FakeSidecarLink, requests: int) -> Heartbeat:
    return Heartbeat(requests, 0, 0, 0, step_times=[(1.0, SECONDS)])


def claims_infinite_speed(link: FakeSidecarLink, requests: int) -> Heartbeat:
    return Heartbeat(requests, 0, 0, 0, step_times=[(1.0, 1e-300)])


def claims_no_load(link: FakeSidecarLink, requests: int) -> Heartbeat:
    return Heartbeat(0, 0, 0, 0, step_times=[(1.0, SECONDS)])


def claims_all(link: FakeSidecarLink, requests: int) -> Heartbeat:
    return Heartbeat(0, 0, 0, 0, step_times=[(1.0, 1e-300)])


def drafts_junk(link: FakeSidecarLink, requests: int) -> Heartbeat:
    link.script = junk
    return claims_all(link, requests)


def drafts_nothing(link: FakeSidecarLink, requests: int) -> Heartbeat:
    link.script = no_drafts
    return claims_all(link, requests)


def declines_by_silence(link: FakeSidecarLink, requests: int) -> Heartbeat:
    link.truncate_to = 0
    return claims_all(link, requests)


def drafts_late(link: FakeSidecarLink, requests: int) -> Heartbeat:
    link.delay = NEVER
    return claims_all(link, requests)


Peer = Callable[[FakeSidecarLink, int], Heartbeat]


def serve(fleet: Fleet, rid: str) -> None:
    """Serve a request whose right output counts up from the end of its prompt."""
    live = fleet.active.live(rid)
    assert live is not None
    last = live.prompt_ids[-1] + 1
    output = [last]
    fleet.active.admit(rid)
    for _ in range(PASSES):
        poll(fleet.active, 1)
        trees = fleet.active.propose([rid], [output], 4)
        tokens, right = trees[0].token_ids, 0
        while right + 1 < len(tokens) and tokens[right + 1] == last + right + 1:
            right += 1
        last += right + 1
        finish_pass(fleet.active, [rid], trees, [list(range(1, right + 1))], [last])
        output = list(live.output_ids)
    fleet.active.end(rid)


def shares(requests: int, **peers: Peer) -> Counter[str]:
    """The number of requests that each peer got of the last half of `requests`."""
    fleet = Fleet(*peers)
    got: Counter[str] = Counter()
    for start in range(0, requests, RUNNING):
        rids = [f"{number}" for number in range(start, start + RUNNING)]
        for rid in rids:
            for name, peer in peers.items():
                fleet.links[name].heartbeat = peer(fleet.links[name], len(fleet.of(name)))
            prompt = [500 + int(rid), 200 + int(rid)]
            enqueue(fleet.active, rid, prompt_ids=prompt, max_new_tokens=200)
        poll(fleet.active)
        got.update({name: len(fleet.of(name)) for name in peers} if 2 * start >= requests else {})
        fleet.check()
        for rid in rids:
            serve(fleet, rid)
    return got


@pytest.mark.parametrize("peer", [claims_infinite_speed, claims_no_load, claims_all])
def test_a_claim_alone_does_not_draw_the_requests(peer: Peer) -> None:
    """All drafts are right, so each of the two should have half of the requests."""
    got = shares(400, good=honest, liar=peer)
    assert got["good"] >= got.total() / 4


@pytest.mark.parametrize("peer", [drafts_junk, drafts_nothing, declines_by_silence, drafts_late])
def test_a_sidecar_whose_drafts_are_of_no_use_gets_few_requests(peer: Peer) -> None:
    got = shares(400, good=honest, liar=peer)
    assert got["good"] >= 0.75 * got.total()
    assert got["liar"] > 0


def test_honest_sidecars_have_equal_shares() -> None:
    got = shares(400, one=honest, other=honest)
    assert min(got.values()) >= 0.4 * got.total()


def test_before_any_evidence_a_claim_counts_up_to_a_factor() -> None:
    fleet = Fleet("good", "liar")
    for number in range(300):
        fleet.links["good"].heartbeat = honest(fleet.links["good"], len(fleet.of("good")))
        fleet.links["liar"].heartbeat = claims_all(fleet.links["liar"], 0)
        enqueue(fleet.active, f"r{number}", prompt_ids=[number])
    assert len(fleet.of("good")) >= 300 / 4
    fleet.check()
