"""Random events on several sidecars of one server, over fake links."""

from __future__ import annotations

import random

import pytest

from sglang_qspec.engine.sidecar.client import SUBMIT_BUDGET_S
from sglang_qspec.link import FakeSidecarLink, Link
from test.engine.sidecar.sidecar_fleet import Fleet
from test.engine.speculating import PROMPT, enqueue, finish_pass, poll


class FleetChaos:
    """Random requests on several sidecars that come, go, and are added and removed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fleet = Fleet("a", "b", "c", tick_s=SUBMIT_BUDGET_S / 20)
        self.active = self.fleet.active
        self.outputs: dict[str, list[int]] = {}
        """Output of each running request."""
        self.waiting: list[str] = []
        self.opened = 0

    def step(self) -> None:
        events = (self.enqueue, self.enqueue, self.admit, self.admit, self.serve, self.serve)
        mishaps = (self.end, self.retract, self.break_link, self.mend_link, self.change)
        self.rng.choice((*events, *mishaps, self.active.poll))()
        self.fleet.check()

    def enqueue(self) -> None:
        self.opened += 1
        rid = f"r{self.opened}"
        self.waiting.append(rid)
        prompt = [*PROMPT, self.rng.randrange(5)]
        enqueue(self.active, rid, prompt_ids=prompt, max_new_tokens=400)

    def admit(self) -> None:
        if self.waiting:
            rid = self.waiting.pop(0)
            self.active.admit(rid)
            self.outputs[rid] = [10]

    def serve(self) -> None:
        """A pass of a target that counts up."""
        rids = list(self.outputs)
        if not rids:
            return
        trees = self.active.propose(rids, [self.outputs[rid] for rid in rids], 6)
        bonus_ids = [self.outputs[rid][-1] + 1 for rid in rids]
        finish_pass(self.active, rids, trees, [[] for _ in rids], bonus_ids)
        for rid, bonus_id in zip(rids, bonus_ids, strict=True):
            self.outputs[rid].append(bonus_id)

    def end(self) -> None:
        if self.outputs:
            rid = self.rng.choice(list(self.outputs))
            self.active.end(rid, len(self.outputs.pop(rid)))

    def retract(self) -> None:
        if self.outputs:
            rid = self.rng.choice(list(self.outputs))
            live = self.active.live(rid)
            assert live is not None
            output = self.outputs.pop(rid)
            enqueue(
                self.active,
                rid,
                prompt_ids=live.prompt_ids,
                output_ids=output,
                max_new_tokens=400,
            )
            self.active.admit(rid)
            self.outputs[rid] = output

    def break_link(self) -> None:
        link = self.rng.choice(list(self.fleet.links.values()))
        kind = self.rng.randrange(4)
        if kind == 0:
            link.queue_full = not link.queue_full
        elif kind == 1:
            link.refuse("by chance")
        else:
            link.die()

    def mend_link(self) -> None:
        self.rng.choice(list(self.fleet.links.values())).revive()

    def change(self) -> None:
        self.active.sidecar.change(self.rng.sample("abcde", self.rng.randint(0, 5)))

    def calm(self) -> None:
        self.active.sidecar.change("abc")
        for link in self.fleet.links.values():
            link.queue_full = False
            link.revive()
        poll(self.active, 100)


@pytest.mark.parametrize("seed", range(25))
def test_every_request_has_one_sidecar_and_every_submission_its_own_number(seed: int) -> None:
    chaos = FleetChaos(seed)
    for _ in range(300):
        chaos.step()
    chaos.calm()
    chaos.fleet.check()
    for rid in (*chaos.waiting, *chaos.outputs):
        live = chaos.active.live(rid)
        assert live is not None
        assert live.drafting.submission is not None, "a request without drafts"
        link: Link = chaos.fleet.links[
            next(each for each in chaos.active.sidecar.endpoints if rid in chaos.fleet.of(each))
        ]
        assert isinstance(link, FakeSidecarLink)
        (submit,) = (s for s in link.submits if s.submission == live.drafting.submission.number)
        assert submit.token_ids == live.prompt_ids + live.output_ids[: submit.base_len]
