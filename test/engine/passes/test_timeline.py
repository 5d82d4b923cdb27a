"""The order of launches, waits and host work in SGLang's overlap loop, on a fake device.

A pass on this device is complete only once the host waits for it (`benchmark.overhead.stubbed`).
The host waits once for each pass, as in a server without QSPEC. It waits for the newest pass, so
that the device has nothing to do, only if the next pass needs its tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = ("plain", "finishing", "aborted", "grammar", "penalty", "verify", "mixed", "off")
EARLY = ("plain", "finishing", "aborted", "off")
"""Cases whose passes are launched before the tokens of the last pass are known."""


def served(kind: str) -> Any:
    ended = subprocess.run(
        [sys.executable, "-m", "test.engine.passes.timeline", kind],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[3],
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> Any:
    return served("qspec")


def places(case: Any, kind: str) -> dict[int, int]:
    """By pass: the place of its only event of this kind."""
    rows = [(number, place) for place, (name, number) in enumerate(case["events"]) if name == kind]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_once_for_each_pass(found: Any, name: str) -> None:
    launches, waits = (places(found[name], kind) for kind in ("launch", "wait"))
    assert launches.keys() == waits.keys()
    assert len(launches) > 3


@pytest.mark.parametrize("name", CASES)
def test_a_pass_without_drafts_is_launched_before_the_wait_for_the_last_one(
    found: Any, name: str
) -> None:
    launches, waits = (places(found[name], kind) for kind in ("launch", "wait"))
    first, *_, last = launches
    # The pass behind the prefill has no drafts to wait for either.
    ahead = [launches[number + 1] < waits[number] for number in range(first + 1, last)]
    if name == "mixed":  # its last passes have no request with drafts
        assert ahead == sorted(ahead)
        assert {*ahead} == {False, True}
    else:
        assert all(ahead) if name in EARLY else not any(ahead)


@pytest.mark.parametrize("name", CASES)
def test_statistics_follow_the_next_launch_and_tokens_are_committed_first(
    found: Any, name: str
) -> None:
    kinds = ("launch", "wait", "commit", "account")
    launches, waits, commits, accounts = (places(found[name], kind) for kind in kinds)
    assert commits.keys() == accounts.keys() == launches.keys() - {min(launches)}
    for number, committed in commits.items():
        assert waits[number] < committed < accounts[number]
        following = launches.get(number + 1)
        if following is not None and name != "grammar":  # SGLang processes its results first
            assert following < accounts[number]
            if name != "mixed":
                assert (committed < following) == (name not in EARLY)


def test_drafts_save_passes_and_an_abort_ends_one_request(found: Any) -> None:
    passes = {name: len(places(found[name], "launch")) for name in CASES}
    assert passes["verify"] < passes["mixed"] == passes["off"]
    assert found["finishing"]["lengths"] == [4, 12, 7]
    assert found["aborted"]["lengths"][0] < 12 == found["aborted"]["lengths"][1]


@pytest.mark.parametrize("name", ["plain", "finishing", "grammar", "penalty", "off"])
def test_each_pass_without_drafts_counts_once_for_its_requests(found: Any, name: str) -> None:
    """The first token is the prefill's. SGLang's own sum of passes is a part of `meta_info`."""
    assert found[name]["passes"] == [length - 1 for length in found[name]["lengths"]]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["plain", "finishing", "aborted", "grammar", "penalty"])
def test_a_server_without_qspec_waits_as_often(found: Any, name: str) -> None:
    for case in (served("stock")[name], found[name]):
        assert len(places(case, "wait")) == len(places(found[name], "launch"))
