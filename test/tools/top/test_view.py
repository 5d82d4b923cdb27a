"""A frame shows the figures of recorded snapshots on 80 columns and 24 lines."""

import copy
import io
import re

import pytest
from rich.console import Console

from sglang_qspec.tools.top.interval import Interval, Snapshot
from sglang_qspec.tools.top.view import frame
from test.tools.top.recorded import IDLE, LOADED, LOST, later

TITLE = "qspec top   http://127.0.0.1:30000"


def drawn(interval: Interval, *, width: int = 80, title: str = TITLE) -> list[str]:
    """The lines of the frame without colours and without trailing spaces."""
    file = io.StringIO()
    Console(file=file, width=width).print(frame(interval, title))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def cells(lines: list[str], name: str) -> list[str]:
    """The words of the line that begins with `name`."""
    (line,) = (line for line in lines if line.startswith(name))
    return line.removeprefix(name).replace(" %", "%").split()


def everything() -> Interval:
    """Large numbers in all places: a busy server with all pipelines and all faults."""
    before, now = (copy.deepcopy(dict(snapshot.state)) for snapshot in LOADED)
    for name, totals in now["pipelines"].items():
        totals.update(passes=99_999, requests=9_999_999, input_tokens=99_999_999)
        totals.update(seconds=before["pipelines"][name]["seconds"] + 1.9, waited_seconds=99_999.0)
    for source in now["sources"].keys() - {"head", "second"}:  # a server has a head or step drafts
        now["proposed_tokens"][source] += 999_999
        now["accepted_tokens"][source] += 888_888
        now["sources"][source]["paused"] = True
    now.update(pipeline="sequential", sidecar="connecting", drafted_tokens=9_999_999)
    now.update(live_requests=9999, waiting_requests=8888, drafting_requests=9999)
    now.update(drafting_rows=9999, sidecar_texts=9999, sidecar_kv_rows=99_999)
    now.update(sidecar_kv_tokens=9_999_999, sidecar_restarts=99, declined_requests=999)
    now.update(sidecar_backlog_seconds=86400.0, sidecar_overload=5)
    now.update(evictions=999, dropped_messages=dict.fromkeys(now["dropped_messages"], 999))
    now["draft_trials"][0].update(requests=[1024, 2047], drafts="none")
    now["queue_to_first_draft_seconds"].update(p50=999.0)
    return Interval(LOADED[0], Snapshot(LOADED[1].time, now))


@pytest.mark.parametrize(
    "interval",
    [Interval(*LOADED), Interval(*LOST), Interval(IDLE, later(IDLE)), everything()],
    ids=["loaded", "lost", "idle", "everything"],
)
def test_a_frame_fits_a_terminal_of_80_columns_and_24_lines(interval: Interval) -> None:
    at_80, at_200 = drawn(interval), drawn(interval, width=200)
    assert at_80 == at_200  # nothing is cut or wrapped
    assert max(map(len, at_80)) <= 80
    assert len(at_80) <= 24


def test_a_long_address_is_cut() -> None:
    lines = drawn(Interval(*LOADED), title="x" * 200)
    assert len(lines[0]) == 80
    assert lines[1].startswith("speculation")


def test_a_server_with_several_sidecars_shows_how_many_are_ready() -> None:
    listed = [{"state": "ready"}, {"state": "lost"}, {"state": "ready"}]
    for sidecars, shown in ((listed, "sidecars 2/3 ready"), (listed[:1], "sidecar ready")):
        lines = drawn(Interval(LOADED[0], later(LOADED[1], sidecars=sidecars)))
        assert lines[1].endswith(shown)


def test_a_busy_server_shows_its_state_and_its_rates() -> None:
    interval = Interval(*LOADED)
    lines = drawn(interval)
    assert lines[0] == TITLE
    assert lines[1] == "speculation on   pipeline ahead (mode auto)   sidecar ready"
    state = LOADED[1].state
    waiting = state["waiting_requests"]
    running = str(state["live_requests"] - waiting)
    assert cells(lines, "requests")[:4] == [running, "running", str(waiting), "waiting"]
    first = state["queue_to_first_draft_seconds"]["p50"]
    assert cells(lines, "requests")[4:] == ["first", "draft", "after", f"{first:.2f}", "s"]
    assert f"{interval.token_rate:.1f} tokens/s" in " ".join(cells(lines, "decoding"))
    assert f"accept length {interval.accept_length:.2f}" in " ".join(lines)
    assert not [line for line in lines if line.startswith("since start")]


def test_a_head_is_shown_in_place_of_step_drafts() -> None:
    proposed = {**LOADED[1].value("proposed_tokens"), "head": 9, "step": 0}
    lines = drawn(Interval(LOADED[1], later(LOADED[1], proposed_tokens=proposed)))
    assert cells(lines, "head ")[0] == "4.5"
    assert not [line for line in lines if line.startswith("step")]


def test_jacobi_guesses_are_shown_once_a_pass_had_some() -> None:
    def sources(count: int) -> tuple[str, ...]:
        proposed = {**LOADED[1].value("proposed_tokens"), "jacobi": count}
        named = {**LOADED[1].value("sources"), "jacobi": LOADED[1].value("sources", "head")}
        now = later(LOADED[1], proposed_tokens=proposed, sources=named)
        return Interval(LOADED[1], now).sources

    assert "jacobi" not in sources(0)
    assert "jacobi" in sources(1)


def test_the_tokens_of_the_sources_add_up_to_the_accept_length() -> None:
    lines = drawn(Interval(*LOADED))
    rows = [cells(lines, f"{source} ") for source in Interval(*LOADED).sources]
    gains = [float(row[4]) for row in rows]
    assert float(cells(lines, "all")[4]) == pytest.approx(1 + sum(gains), abs=0.03)
    verified, accepted, wasted = map(float, cells(lines, "all")[:3])
    assert wasted == pytest.approx(verified - accepted, abs=0.11)
    assert accepted == pytest.approx(sum(float(row[1]) for row in rows), abs=0.3)


def test_the_worth_of_drafts_is_shown_for_the_present_number_of_requests() -> None:
    before, now = LOADED
    assert cells(drawn(Interval(before, now)), "drafts ")[0] == "1.50"
    (trials,) = now.value("draft_trials")
    for changed, shown in (
        ({"drafts": "none"}, "off: 1.50 times plain decoding (1.40 to 1.62) at 2 to 3"),
        ({"over_none": None, "over_none_range": None}, None),
        ({"requests": [4, 7]}, None),
        ({"kind": "grammar"}, None),
    ):
        lines = drawn(Interval(before, later(before, draft_trials=[{**trials, **changed}])))
        found = [line.removeprefix("drafts").strip() for line in lines if line[:7] == "drafts "]
        assert found == ([] if shown is None else [shown])


def test_a_lost_sidecar_is_shown_with_what_was_lost() -> None:
    lines = drawn(Interval(*LOST))
    assert lines[1].endswith("sidecar lost")
    assert cells(lines, "since start") == ["restarts:", "1", "lost", "messages:", "2"]
    assert cells(lines, "sidecar ")[0] == "0"


def test_the_backlog_and_the_overload_of_the_sidecar_are_shown() -> None:
    state = later(LOADED[1], sidecar_backlog_seconds=12.4, sidecar_overload=2)
    (line,) = (line for line in drawn(Interval(LOADED[0], state)) if "backlog" in line)
    assert line.endswith("backlog: 12 s   overload: 2")
    (line,) = (line for line in drawn(Interval(*LOADED)) if "backlog" in line)
    assert line.endswith("backlog: 1 s   overload: 0")


def test_second_choices_are_counted_with_the_first_ones() -> None:
    accepted = {**LOADED[1].value("accepted_tokens")}
    seconds = accepted | {"second": accepted["step"] - LOADED[0].value("accepted_tokens", "step")}
    shown = [
        drawn(Interval(LOADED[0], later(LOADED[1], accepted_tokens=each)))
        for each in (accepted, seconds)
    ]
    before, after = (float(cells(lines, "step ")[1]) for lines in shown)
    assert after == pytest.approx(2 * before, rel=0.01)
    assert not any(line.startswith("second") for line in shown[1])


def test_the_accepted_tokens_of_a_second_of_the_sidecar_are_shown() -> None:
    before, now = LOADED
    used = [
        {**snapshot.value("accepted_tokens"), "prompt": 0, "queue": queue, "step": step}
        for snapshot, queue, step in ((before, 10, 20), (now, 25, 80))
    ]
    since = Snapshot(before.time, {**before.state, "accepted_tokens": used[0]})
    seconds = before.value("sidecar_pass_seconds") + 1.5
    until = later(before, accepted_tokens=used[1], sidecar_pass_seconds=seconds)
    assert "worth: 50.0/s" in " ".join(cells(drawn(Interval(since, until)), "sidecar "))
    assert "worth: -/s" in " ".join(cells(drawn(Interval(IDLE, later(IDLE))), "sidecar "))


def test_an_idle_server_shows_no_ratios_and_no_pipelines() -> None:
    lines = drawn(Interval(IDLE, later(IDLE)))
    assert "accept length -" in " ".join(lines)
    assert cells(lines, "step") == ["0.0", "0.0", "0.0", "-", "-"]
    assert not [line for line in lines if line.startswith("pipeline")]


def test_paused_sources_and_ended_speculation_are_shown() -> None:
    sources = copy.deepcopy(LOADED[1].state["sources"])
    sources["prompt"]["paused"] = True
    lines = drawn(Interval(LOADED[1], later(LOADED[1], sources=sources)))
    assert [line.split()[0] for line in lines if line.endswith("paused")] == ["prompt"]
    off = {**IDLE.state["settings"], "enabled": False}
    assert drawn(Interval(IDLE, later(IDLE, settings=off)))[1].startswith("speculation off ")
    failed = later(IDLE, settings=off, failed=True)
    assert drawn(Interval(IDLE, failed))[1].startswith("speculation failed ")


def test_states_have_colours_on_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    console.print(frame(Interval(*LOST), TITLE))
    assert re.search("\x1b\\[32mon\x1b", file.getvalue())
    assert re.search("\x1b\\[1;31mlost\x1b", file.getvalue())
