"""Requests of one server in any order of events: every draft is the model's, and all KV is freed.

`test_fuzz.py` covers several servers, wrong messages and failures. Here the commits fit to the
output, so most of them continue or replace a step draft.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_qspec.config import MAX_COMPLETIONS
from test.sidecar.drafter_driver import DrafterDriver
from test.sidecar.scripted import ScriptedModel

which = st.integers(0, 1000)
"""Chooses a live request."""


def mixed(sequence: tuple[int, ...]) -> int:
    """A token that depends on all before it."""
    return (sum(sequence) * 31 + len(sequence)) % 997


class Requests(RuleBasedStateMachine):
    """Requests of any rank arrive, are served, diverge and end, with more or less KV."""

    step_drafts = 0
    """Number of step drafts in all runs."""

    @initialize(
        tokens=st.sampled_from((4096, 90, 40)),
        rows=st.sampled_from((64, 9, 3)),
        slots=st.sampled_from((64, 3, 1)),
        prefill_tokens=st.sampled_from((256, 8)),
        apart=st.booleans(),
    )
    def begin(self, tokens: int, rows: int, slots: int, prefill_tokens: int, apart: bool) -> None:
        model = ScriptedModel(mixed, tokens=tokens, rows=rows)
        self.driver = DrafterDriver(model, slots=slots, prefill_tokens=prefill_tokens, apart=apart)
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.live: list[str] = []

    @rule(text=st.integers(0, 5), rank=st.integers(0, 1), most=st.integers(1, 11))
    def submit(self, text: int, rank: int, most: int) -> None:
        rid = f"r{len(self.prompts)}"
        self.prompts[rid] = list(range(100 * text, 100 * text + 12))
        self.outputs[rid] = []
        self.live.append(rid)
        self.driver.submit(rid, self.prompts[rid], rank=(rank, 0), max_new_tokens=most)

    @precondition(lambda self: not self.driver.drafter.idle)
    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        self.driver.step(count)

    @precondition(lambda self: self.live)
    @rule(
        which=which,
        follows=st.booleans(),
        others=st.lists(st.integers(0, 899), min_size=1, max_size=3),
        lookahead=st.integers(0, 5),
    )
    def commit(self, which: int, follows: bool, others: list[int], lookahead: int) -> None:
        """The target chooses the model's token first, or diverges at once."""
        rid = self.live[which % len(self.live)]
        output = self.outputs[rid]
        fresh = [mixed((*self.prompts[rid], *output))] * follows + others
        self.driver.commit(rid, len(output), fresh, max_new_tokens=lookahead)
        output += fresh

    @precondition(lambda self: self.live)
    @rule(which=which)
    def admit(self, which: int) -> None:
        self.driver.admit(self.live[which % len(self.live)])

    @precondition(lambda self: self.live)
    @rule(which=which)
    def close(self, which: int) -> None:
        self.driver.close(self.live.pop(which % len(self.live)))

    @invariant()
    def is_consistent(self) -> None:
        self.driver.drafter.check_integrity()

    def teardown(self) -> None:
        driver = self.driver
        driver.run()
        for name, tokens in driver.told.items():
            _, rid, completion = name
            Requests.step_drafts += completion >= MAX_COMPLETIONS
            sequence = (*self.prompts[rid], *self.outputs[rid][: driver.bases[name]])
            for token in tokens:
                assert token == mixed(sequence)
                sequence += (token,)
        driver.leave(*self.live)


def test_any_order_of_events_leaves_correct_drafts_and_frees_all_kv() -> None:
    Requests.step_drafts = 0
    limits = settings(max_examples=60, stateful_step_count=50)
    run_state_machine_as_test(Requests, settings=limits)
    assert Requests.step_drafts > 30  # otherwise the test would test little
