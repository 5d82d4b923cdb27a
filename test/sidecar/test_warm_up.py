"""The passes before the first request tell how long draft steps take, and leave nothing behind."""

from __future__ import annotations

import pytest

from sglang_qspec.errors import DraftModelError
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.warm_up import MOST_S, READ, TIMED, read_seconds, step_seconds
from test.sidecar.scripted import ScriptedModel


class Timed:
    """A model of which a pass takes `seconds`, and for each row a hundredth of that more."""

    def __init__(self, seconds: float = 0.01, *, rows: int = 64, tokens: int = 4096) -> None:
        self.model = ScriptedModel(rows=rows, tokens=tokens)
        self.now = 0.0
        self.factors: list[float] = []
        """Factors of the first passes; later ones have 1."""

        def run(tokens: int) -> None:
            factor = self.factors.pop(0) if self.factors else 1.0
            self.now += seconds * factor * (1 + tokens / 100)

        self.model.on_pass = run

    def measured(self, slots: int = 4) -> list[tuple[int, float]]:
        found = step_seconds(self.model, slots, lambda: self.now)
        self.model.rows.check_integrity()
        assert self.model.rows.open_rows == 0
        assert self.model.rows.free_slots == self.model.rows.total_slots
        return found


def test_each_size_up_to_the_slots_has_its_time() -> None:
    found = Timed().measured(slots=5)
    assert [rows for rows, _ in found] == [1, 2, 4]
    assert [seconds for _, seconds in found] == pytest.approx([0.0101, 0.0102, 0.0104])


def test_the_first_pass_and_an_interrupted_one_do_not_count() -> None:
    timed = Timed()
    timed.factors = [1.0, 50.0, 9.0]  # a prefill, the first step, and one beside another process
    ((rows, seconds),) = timed.measured(slots=1)
    assert rows == 1
    assert seconds == pytest.approx(0.0101)
    assert [verb for verb, _, _ in timed.model.passes] == ["extend"] + ["step"] * (1 + TIMED)


def test_a_slow_model_measures_what_the_time_allows() -> None:
    found = Timed(MOST_S / 2).measured()
    assert [rows for rows, _ in found] == [1]


@pytest.mark.parametrize(("options", "sizes"), [({"rows": 2}, [1, 2]), ({"tokens": 10}, [1, 2])])
def test_a_small_kv_limits_the_sizes(options: dict[str, int], sizes: list[int]) -> None:
    assert [rows for rows, _ in Timed(**options).measured(slots=64)] == sizes


@pytest.mark.parametrize("error", [DraftModelError("no room"), RuntimeError("no kernel")])
def test_a_model_that_fails_does_not_end_the_start(error: Exception) -> None:
    timed = Timed()
    timed.model.failures = [error]
    assert timed.measured() == []
    assert len(timed.measured()) == 3


def test_a_pass_over_a_prompt_tells_how_long_reading_takes() -> None:
    timed = Timed()
    found = read_seconds(timed.model, lambda: timed.now)
    assert found == pytest.approx(0.01 * (1 + READ / 100) / READ)
    assert timed.model.rows.open_rows == 0
    assert timed.model.rows.free_slots == timed.model.rows.total_slots


@pytest.mark.parametrize("error", [DraftModelError("no room"), RuntimeError("no kernel")])
def test_without_a_pass_over_a_prompt_reading_is_unknown(error: Exception) -> None:
    assert read_seconds(Timed(tokens=READ - 1).model) == 0.0
    failing = Timed().model
    failing.failures = [error]
    assert read_seconds(failing) == 0.0
    assert failing.rows.open_rows == 0


def test_a_drafter_knows_the_times_of_its_steps_before_the_first_request() -> None:
    model = ScriptedModel()
    drafter = Drafter(model, slots=8)
    assert drafter.statistics.step_times == []
    drafter.warm_up()
    assert [rows for rows, _ in drafter.statistics.step_times] == [1.0, 2.0, 4.0, 8.0]
    assert drafter.statistics.read_seconds > 0.0
    assert drafter.statistics.step_passes == drafter.statistics.drafted_tokens == 0
    assert drafter.idle
    drafter.check_integrity()
