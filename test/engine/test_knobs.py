"""What can be changed while the server runs."""

import pytest

from sglang_qspec.config import MODES, QSpecConfig
from sglang_qspec.engine import knobs
from sglang_qspec.engine.knobs import Knobs
from sglang_qspec.errors import RequestError


def test_they_start_as_the_server_s_settings() -> None:
    started = Knobs.of(QSpecConfig(mode="halves", step_tokens=5), 8, graphs=False)
    assert started == Knobs("halves", 5, 8, fixed_width=False)
    assert Knobs.of(QSpecConfig(width="fixed"), 8, graphs=False).fixed_width
    assert Knobs.of(QSpecConfig(), 8, graphs=True).fixed_width


def test_a_mode_is_set_by_its_place_and_a_switch_by_a_number() -> None:
    current = Knobs.of(QSpecConfig(), 8, graphs=False)
    given = {"qspec_mode": 2, "qspec_step_tokens": 3.0, "qspec_draft_token_num": 4}
    knobs.check({**given, "qspec_fixed_width": 1}, 8, graphs=False)
    for name, value in given.items():
        current.set(name, value)
    current.set("qspec_fixed_width", 1)
    assert current == Knobs(MODES[2], 3, 4, fixed_width=True)


def test_steps_run_ahead_only_where_that_is_of_use() -> None:
    current = Knobs("auto", 16, 5, fixed_width=False)
    leads = {pipeline: current.lead(pipeline) for pipeline in MODES[:-1]}
    assert leads == {"queue": 0, "sequential": 4, "halves": 4, "ahead": 16}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("qspec_mode", 5, r"from 0 to 4 \(queue, sequential, halves, ahead, auto\)"),
        ("qspec_mode", 1.5, "from 0 to 4"),
        ("qspec_step_tokens", 0, "from 1 to 64"),
        ("qspec_draft_token_num", 9, "from 1 to 8"),
        ("qspec_fixed_width", float("nan"), "from 0 to 1"),
        ("qspec_step_tokens", float("inf"), "from 1 to 64"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: float, allowed: str) -> None:
    with pytest.raises(RequestError, match=rf"{name} is {value}, but must be .*{allowed}"):
        knobs.check({name: value}, 8, graphs=False)


def test_captured_graphs_have_one_width() -> None:
    with pytest.raises(RequestError, match="from 8 to 8"):
        knobs.check({"qspec_draft_token_num": 4}, 8, graphs=True)
    with pytest.raises(RequestError, match="from 1 to 1"):
        knobs.check({"qspec_fixed_width": 0}, 8, graphs=True)


def test_an_unknown_knob_is_refused_and_those_of_others_are_let_through() -> None:
    knobs.check({"pp_max_micro_batch_size": 8}, 8, graphs=False)
    with pytest.raises(RequestError, match="qspec_temprature cannot be set; what can be is qspec_"):
        knobs.check({"qspec_temprature": 1}, 8, graphs=False)
