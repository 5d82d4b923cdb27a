"""Settings that can change while the server runs."""

import pytest

from sglang_qspec import controls
from sglang_qspec.config import MODES, QSpecConfig
from sglang_qspec.draft_source import SOURCES
from sglang_qspec.errors import RequestError
from sglang_qspec.policy import runtime_settings
from sglang_qspec.policy.runtime_settings import RuntimeSettings

SETTINGS = QSpecConfig()


def check(given: dict[str, float]) -> None:
    """Check as a server that was started with the defaults and 8 draft tokens."""
    runtime_settings.check(given, SETTINGS, 8, ragged=(0, 1))


def test_they_start_as_the_servers_settings() -> None:
    started = RuntimeSettings.of(QSpecConfig(mode="halves", step_tokens=5, completions=3), 8)
    assert started == RuntimeSettings("halves", 5, 8, fixed_width=False, completions=3)
    assert started.enabled
    assert started.sources == set(SOURCES)
    assert RuntimeSettings.of(QSpecConfig(width="fixed"), 8).fixed_width


def test_a_mode_is_set_by_its_index_and_a_switch_by_0_or_1() -> None:
    current = RuntimeSettings.of(QSpecConfig(), 8)
    given = {"qspec_mode": 2, "qspec_step_tokens": 3.0, "qspec_draft_token_num": 4}
    switched = {"qspec_fixed_width": 1, "qspec_enabled": 0.0, "qspec_source_step": 0}
    check({**given, **switched, "qspec_completions": 2})
    for name, value in {**given, **switched, "qspec_completions": 2}.items():
        current.set(name, value)
    assert current == RuntimeSettings(
        MODES[2],
        3,
        4,
        fixed_width=True,
        enabled=False,
        completions=2,
        sources=frozenset(SOURCES) - {"step"},
    )
    assert current.describe()["source_step"] is False
    assert current.describe()["source_queue"] is True
    current.set("qspec_source_step", 1)
    assert current.sources == set(SOURCES)


def test_every_setting_can_be_set() -> None:
    check(dict.fromkeys(runtime_settings.NAMES, 1))
    assert {f"qspec_source_{source}" for source in SOURCES} <= set(runtime_settings.NAMES)
    shown = RuntimeSettings.of(QSpecConfig(), 8).describe()
    assert {"qspec_" + name for name in shown} == set(runtime_settings.NAMES)


def test_a_request_gets_what_it_asks_for_within_the_settings() -> None:
    current = RuntimeSettings.of(QSpecConfig(), 8)
    wanted = controls.read({"qspec_completions": 5, "qspec_sources": ["queue", "step"]}, SETTINGS)
    assert current.grant(wanted) == wanted
    current.completions, current.sources = 3, current.sources - {"step"}
    granted = current.grant(wanted)
    assert (granted.completions, granted.sources) == (3, frozenset({"queue"}))
    assert granted.enabled
    current.enabled = False
    assert not current.grant(wanted).enabled


def test_the_pipeline_bounds_how_far_step_drafts_run_ahead() -> None:
    current = RuntimeSettings("auto", 16, 5, fixed_width=False)
    leads = {pipeline: current.lookahead(pipeline, width=5) for pipeline in MODES[:-1]}
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
        ("qspec_enabled", 2, "from 0 to 1"),
        ("qspec_completions", 0, "from 1 to 8"),
        ("qspec_completions", 9, "from 1 to 8"),
        ("qspec_source_guess", 0.5, "from 0 to 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: float, allowed: str) -> None:
    with pytest.raises(RequestError, match=rf"{name} is {value}, but must be .*{allowed}"):
        check({name: value})


def test_passes_become_ragged_only_where_the_attention_backend_can_run_them() -> None:
    current = RuntimeSettings.of(QSpecConfig(), 8, ragged=True)
    assert current.ragged
    current.set("qspec_ragged", 0)
    assert not current.ragged
    runtime_settings.check({"qspec_ragged": 0}, SETTINGS, 8)
    with pytest.raises(RequestError, match="qspec_ragged is 1, but must be .* from 0 to 0"):
        runtime_settings.check({"qspec_ragged": 1}, SETTINGS, 8)
    with pytest.raises(RequestError, match="qspec_ragged is 0, but must be .* from 1 to 1"):
        runtime_settings.check({"qspec_ragged": 0}, SETTINGS, 8, ragged=(1, 1))


def test_an_unknown_setting_is_refused_and_settings_of_sglang_pass() -> None:
    check({"pp_max_micro_batch_size": 8})
    with pytest.raises(RequestError, match="qspec_temprature is not .*; allowed are qspec_"):
        check({"qspec_temprature": 1})


def test_drafts_of_prefills_may_be_ruled_out() -> None:
    runtime_settings.check({"qspec_prefill_drafts": 0}, SETTINGS, 8, prefill_drafts=False)
    with pytest.raises(RequestError, match="qspec_prefill_drafts is 1, but must be .* 0 to 0"):
        runtime_settings.check({"qspec_prefill_drafts": 1}, SETTINGS, 8, prefill_drafts=False)
