"""Bursts of decode passes draft what single passes draft, end in time, and cost the host little."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_qspec import transfers
from sglang_qspec.link import Peer
from sglang_qspec.messages import Commit, Commits, SeededSampling
from sglang_qspec.sidecar import burst
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.pass_runner import PassRunner
from sglang_qspec.sidecar.sampler import Sampler
from sglang_qspec.sidecar.sampling import GREEDY, Sampling
from test.sidecar.drafter_driver import ONE, DrafterDriver
from test.sidecar.scripted import ScriptedModel
from test.sidecar.test_loop import Scripted, single, submit
from test.verify.fake_cuda import CUDA, Costs, fake_cuda

MOST = 8
SMALLER = Peer("smaller", b"3", 900)
"""A server whose target has fewer token ids."""
SEEDED = SeededSampling(7, 0.9, top_p=0.9)


def of_all_kinds(most_passes: int, most_bursts: int = 1) -> DrafterDriver:
    """A driver after it has drafted completions of all kinds, which end at different lengths."""
    model = ScriptedModel(lambda sequence: sum(sequence) % 900)
    model.certainty = 7.0  # so that samples differ
    driver = DrafterDriver(model, most_passes=most_passes, most_bursts=most_bursts)
    for number in range(12):
        driver.submit(
            f"r{number}",
            [5 + number, 6 + number],
            peer=ONE if number % 3 else SMALLER,
            completions=1 + number % 4,
            max_new_tokens=5 + 3 * number,
            stop=list(range(0, 1000, 37)),
            greedy_first=number % 5 > 0,
            seeded=SEEDED if number % 2 else None,
        )
    driver.step(2)
    driver.submit("late", [77], completions=3, max_new_tokens=9)  # without prefill
    driver.run()
    return driver


@pytest.mark.parametrize("most_bursts", [1, 4])
def test_bursts_draft_the_tokens_of_single_passes_and_free_the_rest(most_bursts: int) -> None:
    drivers = [of_all_kinds(1), of_all_kinds(MOST, most_bursts)]
    alone, bursts = drivers
    assert bursts.told == alone.told
    lengths = {len(tokens) for tokens in alone.told.values()}
    assert 2 in lengths  # ended by itself, within a burst
    assert {5, 8, 38} <= lengths  # limits
    assert sorted(map(str, bursts.finished)) == sorted(map(str, alone.finished))
    assert bursts.model.rows.free_slots == alone.model.rows.free_slots
    drafted = [driver.drafter.statistics.drafted_tokens for driver in drivers]
    assert drafted[0] == drafted[1]


def test_a_step_without_prefill_drafts_several_tokens() -> None:
    driver = DrafterDriver(ScriptedModel(), most_passes=MOST)
    driver.submit("a", [5, 6], completions=1, max_new_tokens=20)
    driver.step(2)
    assert driver.told[ONE, "a", 0] == list(range(7, 7 + 1 + MOST))


def test_a_completion_takes_part_in_a_burst_up_to_its_limit() -> None:
    driver = DrafterDriver(ScriptedModel(), most_passes=MOST)
    for number, limit in enumerate((3, 30, 6)):
        driver.submit(f"r{number}", [9 * number, 5], completions=1, max_new_tokens=limit)
    driver.step(2)
    assert [rows for verb, rows, _ in driver.model.passes if verb == "step"] == [
        *(3, 3, 2, 2, 2, 1, 1, 1)
    ]


def test_a_burst_takes_no_more_kv_than_is_free() -> None:
    driver = DrafterDriver(ScriptedModel(tokens=30), most_passes=MOST)
    for number in range(2):
        driver.submit(f"r{number}", [9 * number, 5], completions=1, max_new_tokens=30)
    driver.step(3)  # 26 slots are free after two prompts of 2 tokens
    assert [rows for verb, rows, _ in driver.model.passes if verb == "step"] == [2] * (8 + 5)


def test_a_server_at_its_limit_gets_the_tokens_up_to_it() -> None:
    driver = DrafterDriver(ScriptedModel(), most_passes=MOST, max_server_tokens=5)
    driver.submit("a", [5, 6], completions=1, max_new_tokens=20)
    driver.run()
    assert driver.told[ONE, "a", 0] == [7, 8, 9, 10, 11]
    driver.leave("a")


def test_a_burst_that_ends_early_gives_its_kv_back_and_loses_no_token() -> None:
    driver = DrafterDriver(ScriptedModel(), most_passes=MOST)
    driver.submit("a", [5, 6], completions=1, max_new_tokens=30)
    driver.step()
    free, answers = driver.model.rows.free_slots, iter([False, False, True])
    driver.drafter.step(lambda: next(answers))
    driver.drafter.check_integrity()
    assert free - driver.model.rows.free_slots == 3
    driver.run()
    assert driver.told[ONE, "a", 0] == list(range(7, 37))


def test_a_message_ends_a_burst() -> None:
    drafter = Drafter(ScriptedModel(), most_passes=MOST)
    wire = Scripted(drafter, (ONE, single(1)))
    coming: list[Any] = [[], [], [(ONE, submit(2, [70, 71]))]]
    received = wire.receive
    seen: list[int] = []

    def receive(timeout_ms: int) -> Any:
        steps = [verb for verb, *_ in model.passes if verb == "step"]
        if not steps or not coming:
            return received(timeout_ms)
        seen.append(len(steps))
        return coming.pop(0)

    model: Any = drafter._model
    wire.receive = receive  # type: ignore[method-assign]
    wire.run()
    assert seen == [1, 2, 3]
    assert [verb for verb, *_ in model.passes][:5] == ["extend", *["step"] * 3, "extend"]


def test_step_drafts_have_no_bursts() -> None:
    driver = DrafterDriver(ScriptedModel(), most_passes=MOST)
    driver.submit("a", [5, 6], completions=0)
    driver.admit("a")
    driver.submit("b", [15, 16], completions=1, max_new_tokens=30)
    driver.commit("a", 0, [7], max_new_tokens=6)
    for drafted in range(1, 7):
        driver.step()
        assert len(driver.model.passes) <= 2 * drafted
        assert len(driver.told[ONE, "b", 0]) <= drafted
    passes = len(driver.model.passes)
    driver.step()  # the step draft rests at its lookahead
    assert len(driver.model.passes) == passes + MOST


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What passes and the host do: `pass`, `wait N` for the pass with this number, and `ask`."""
    done: list[str] = []

    def mark(_: object) -> Callable[[], None]:
        number = done.count("pass") - 1
        return lambda: done.append(f"wait {number}")

    monkeypatch.setattr(burst, "mark", mark)
    return done


def serve(order: list[str], *, following: bool) -> None:
    """Draft for a waiting request, beside one with a step draft at its lookahead or without."""
    model = ScriptedModel()
    driver = DrafterDriver(model, most_passes=4)
    if following:
        driver.submit("a", [5, 6], completions=0)
        driver.admit("a")
        driver.drafter.follow(ONE, Commits([Commit(driver.number("a"), 0, [7], 1)]))
        driver.step()
    driver.submit("b", [15, 16], completions=1, max_new_tokens=30)
    driver.step()
    model.on_pass = lambda _: order.append("pass")

    def ends() -> bool:
        order.append("ask")
        return False

    driver.drafter.step(ends)


def test_a_pass_is_queued_behind_the_present_one(order: list[str]) -> None:
    serve(order, following=False)
    assert order == ["pass", "ask", "pass", "wait 0", "ask", "pass", "wait 1", "ask", "pass"]


def test_no_pass_is_queued_while_a_server_may_commit(order: list[str]) -> None:
    serve(order, following=True)
    further = (each for number in range(3) for each in (f"wait {number}", "ask", "pass"))
    assert order == ["pass", *further]


@pytest.mark.parametrize("waits", [False, True])
def test_tokens_are_appended_beside_the_first_pass_of_the_next_burst(
    order: list[str], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Unless another completion waits. The second burst goes on with the tokens of the first."""
    model = ScriptedModel()
    driver = DrafterDriver(model, most_passes=3, most_bursts=3, slots=1)
    driver.submit("a", [5, 6], completions=1, max_new_tokens=9)
    driver.step()
    if waits:
        driver.submit("b", [15, 16], completions=1)
    model.on_pass = lambda _: order.append("pass")
    append, read = PassRunner._append, transfers.HostCopy.read

    def appended(*given: Any, **named: Any) -> None:
        order.append("append")
        append(*given, **named)

    def downloaded(copy: transfers.HostCopy) -> Any:
        order.append("read")
        return read(copy)

    monkeypatch.setattr(PassRunner, "_append", appended)
    monkeypatch.setattr(transfers.HostCopy, "read", downloaded)
    driver.step()
    first, second = "pass pass pass", "pass read append pass pass"
    told = [*first.split(), *("" if waits else second + " pass read append pass").split()]
    assert [each for each in order if "wait" not in each] == [*told, "read", "append"]
    driver.drafter.check_integrity()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    """Fake CUDA tensors; the host reads ones, and an event has always occurred."""
    event = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(transfers, "_event", lambda _: event)
    read = lambda copy: np.ones(tuple(copy._host.shape), np.int64)  # noqa: E731
    monkeypatch.setattr(transfers.HostCopy, "read", read)
    with fake_cuda() as costs:
        yield costs


@pytest.mark.parametrize("passes", [1, MOST])
@pytest.mark.parametrize(
    "samplings",
    [[GREEDY], [Sampling(0.7)], [SEEDED], [GREEDY, Sampling(0.7), Sampling(0.7, 0.9), SEEDED]],
    ids=["greedy", "drawn", "seeded", "mixed"],
)
def test_a_burst_has_one_upload_and_one_download(
    on_gpu: Costs, samplings: list[Any], passes: int
) -> None:
    model: Any = object.__new__(DraftModel)
    fed: list[torch.Tensor] = []

    def forward(**fields: Any) -> torch.Tensor:
        fed.append(fields["input_ids"])
        assert all(fields[each].device == CUDA for each in ("positions", "seq_lens"))
        return torch.rand(len(fields["input_ids"]), 2000, device=CUDA)

    model._forward = forward
    model.rows = KVRows(torch.zeros(9, 99, dtype=torch.int32, device=CUDA), 99, np.arange(1, 200))
    # Not in inference mode, in which the operators of copies have other names.
    model.decode = lambda *given: inspect.unwrap(DraftModel.decode)(model, *given)
    count = 2 * len(samplings)
    counts = [passes] * len(samplings) + [1] * len(samplings)
    own = [model.rows.open() for _ in range(count)]
    sizes = [900 + row % 2 for row in range(count)]
    sampler = Sampler(samplings * 2, range(count), [5] * count, sizes, passes)
    drawing = burst.Drawing(model, own, [1] * count, counts, sampler)
    assert drawing.run(queued=True)
    drawn = drawing.read()
    assert [len(tokens) for tokens in drawn.token_ids] == counts
    assert [len(tokens) for tokens in fed] == [count, *[len(samplings)] * (passes - 1)]
    assert {tokens.device for tokens in fed} == {CUDA}
    assert len(on_gpu.uploads) == 1
    assert on_gpu.downloads == [8 * sum(counts)]
    assert not on_gpu.synchronisations
