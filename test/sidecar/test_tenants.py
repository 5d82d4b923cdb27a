"""Several servers at one sidecar: no data passes between them, and each gets its share of time."""

from __future__ import annotations

import pytest

from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    MAX_SUBMISSIONS,
    Declined,
    SeededSampling,
    Submit,
)
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.quota import Quota
from test.sidecar.drafter_driver import ONE, TWO, DrafterDriver
from test.sidecar.scripted import ScriptedModel, undecided

PROMPT = list(range(100, 150))


def test_a_draft_drawn_with_one_servers_seed_reaches_no_other_server() -> None:
    driver = DrafterDriver(undecided())
    driver.submit("a", PROMPT, seeded=SeededSampling(5, 1.0))
    driver.submit("b", PROMPT, peer=TWO, seeded=SeededSampling(6, 1.0))
    driver.run()
    own = tuple(driver.told[ONE, "a", 0])
    others = {tuple(driver.told[TWO, "b", number]) for number in range(3)}
    assert own not in others
    driver.leave("a")


def test_the_timing_of_a_draft_does_not_reveal_prompts_of_another_server() -> None:
    def passes_to_first(asked_before: bool) -> int:
        driver = DrafterDriver(ScriptedModel(), prefill_tokens=8)
        if asked_before:
            driver.submit("a", PROMPT)
            driver.run()
        before = len(driver.model.passes)
        driver.submit("b", [*PROMPT, 7], peer=TWO)
        driver.submit("c", PROMPT, peer=TWO)
        while not driver.told[TWO, "c", 0]:
            driver.step()
        return len(driver.model.passes) - before

    assert passes_to_first(asked_before=True) == passes_to_first(asked_before=False)


def test_an_operator_may_let_servers_share_drafts_and_kv() -> None:
    driver = DrafterDriver(ScriptedModel(), share=True)
    driver.submit("a", PROMPT)
    driver.run()
    read = driver.model.read_tokens
    driver.submit("b", PROMPT, peer=TWO)
    assert driver.told[TWO, "b", 0] == driver.told[ONE, "a", 0]
    driver.submit("c", [*PROMPT, 7], peer=TWO)
    driver.run()
    assert driver.model.read_tokens <= read + 2
    driver.leave("a")


def greedy(driver: DrafterDriver, count: int, peer: Peer = ONE) -> None:
    """Submit `count` requests with as many drafts as possible."""
    for number in range(count):
        driver.submit(
            f"{peer}{number}",
            [7 * number % 900, number % 90, 1],
            peer=peer,
            completions=8,
            max_new_tokens=200,
        )


@pytest.mark.parametrize("servers", [2, 8])
@pytest.mark.parametrize("apart", [True, False])
def test_a_server_with_few_requests_gets_its_share_of_the_passes(
    servers: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes one second on the test's clock; with `apart`, one more second per eight rows."""
    driver = DrafterDriver(ScriptedModel(tokens=1 << 16, rows=256), slots=16, apart=apart)
    now = [0.0]
    monkeypatch.setattr("sglang_qspec.sidecar.pass_runner.time.monotonic", lambda: now[0])

    def spend(tokens: int) -> None:
        now[0] += 1.0 + (tokens / 8 if apart else 0.0)

    driver.model.on_pass = spend
    for number in range(servers - 1):
        greedy(driver, 20, Peer(f"greedy {number}", bytes([number])))
    driver.step(20)
    began = now[0]
    driver.submit("light", [3, 4, 5], peer=TWO, completions=1, max_new_tokens=40)
    while len(driver.told[TWO, "light", 0]) < 40:
        driver.step()
    alone = 40 * (1 + (1 / 8 if apart else 0))
    # One pass of a greedy server may be running when the light one arrives.
    assert now[0] - began <= servers * alone + 8 * (1 + 2)


def test_a_late_server_gets_no_credit_for_the_time_before_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A short idle time does not lower the share of a server either."""
    driver = DrafterDriver(ScriptedModel(tokens=1 << 16), slots=1, apart=True)
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr("sglang_qspec.sidecar.pass_runner.time.monotonic", clock)
    driver.submit("a", [1, 2, 3], completions=1, max_new_tokens=100)
    driver.run()  # idle now, after a hundred passes
    driver.submit("late", [7, 8], peer=TWO, completions=1, max_new_tokens=200)
    driver.step(4)
    driver.submit("b", [4, 5], completions=1, max_new_tokens=20)
    driver.step(42)
    assert len(driver.told[ONE, "b", 0]) >= 18
    driver.leave("a", "b")


def test_long_prompts_count_against_the_share_of_their_server() -> None:
    driver = DrafterDriver(
        ScriptedModel(tokens=1 << 16, rows=128, context_len=4096), prefill_tokens=64
    )
    for number in range(8):
        driver.submit(f"long{number}", [*range(900), number, *range(90)] * 3, completions=1)
    greedy(driver, 8, TWO)
    driver.step(20)
    seconds = {peer: queue.seconds for peer, queue in driver.drafter.queue._queues.items()}
    tokens = sum(len(told) for (peer, *_), told in driver.told.items() if peer == TWO)
    assert tokens > 8 * 12
    assert min(seconds.values()) > 0
    driver.leave(*(f"long{number}" for number in range(8)))


def test_a_paused_draft_keeps_its_row_while_its_server_holds_less_kv() -> None:
    driver = DrafterDriver(ScriptedModel(tokens=300, rows=64))
    driver.submit("a", [1, 2, 3], completions=1, max_new_tokens=4)
    driver.run()
    driver.admit("a")
    driver.commit("a", 0, [50], max_new_tokens=4)
    driver.run()  # its step draft pauses
    greedy(driver, 20, TWO)
    driver.step(80)
    assert driver.model.rows.free_slots < 80
    (subscription,) = (
        prompt.subscriptions[ONE, 0]
        for prompt in driver.drafter.queue.prompts.values()
        if prompt.owner == ONE
    )
    assert subscription.step_draft is not None
    assert subscription.step_draft.row is not None
    driver.leave("a")


def test_a_server_takes_kv_from_another_until_both_hold_the_same() -> None:
    driver = DrafterDriver(ScriptedModel(tokens=400, rows=64), slots=32)
    greedy(driver, 10)
    driver.step(20)
    greedy(driver, 10, TWO)
    held = {ONE: 0, TWO: 0}
    for _ in range(60):
        driver.step()
    for completion in driver.drafter._allocator._holders:
        assert completion.row is not None
        held[completion.text.owner] += driver.model.rows.length(completion.row)
    assert min(held.values()) > 100, held
    driver.leave(*(f"{ONE}{number}" for number in range(10)))


def test_prompts_over_a_servers_share_are_declined_and_others_are_not() -> None:
    model = ScriptedModel(context_len=200)
    drafter = Drafter(model, max_server_tokens=250)

    def declined(peer: Peer, number: int, size: int) -> list[str]:
        drafter.submit(peer, Submit(number, [7] * size, 0, 8, 1, 0.5))
        return [m.reason for _, m in drafter.take() if isinstance(m, Declined)]

    assert declined(ONE, 1, 199) == []
    assert "250 text tokens" in declined(ONE, 2, 60)[0]
    assert declined(ONE, 3, 50) == []
    assert declined(TWO, 1, 199) == []
    assert "200 tokens" in declined(TWO, 2, 200)[0]
    drafter.drop(ONE)
    drafter.drop(TWO)
    drafter.check_integrity()
    assert len(drafter.queue.prompts) == 0


def test_the_number_of_open_submissions_of_a_server_is_bounded() -> None:
    quota = Quota(100)
    for _ in range(MAX_SUBMISSIONS):
        quota.open(ONE, 1)
    submit = Submit(1, [1], 0, 8, 1, 0.5)
    objection = quota.objection(ONE, submit)
    assert objection is not None
    assert objection.retry
    assert str(MAX_SUBMISSIONS) in objection.reason
    assert quota.objection(TWO, submit) is None


def test_completions_over_a_servers_share_end_and_step_drafts_continue() -> None:
    driver = DrafterDriver(ScriptedModel(), max_server_tokens=30)
    driver.submit("a", [1, 2, 3], completions=3, max_new_tokens=20)
    driver.run()
    told = [len(driver.told[ONE, "a", number]) for number in range(3)]
    assert sum(told) == 30 + 2  # 2 more in the pass that reached the share
    driver.admit("a")
    driver.commit("a", 0, [50])
    driver.run()
    assert driver.told[ONE, "a", 64] == list(range(51, 61))
    driver.leave("a")
