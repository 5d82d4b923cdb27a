"""The passes of requests that ask for a trace are recorded token by token, within the caps."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.engine import speculation
from sglang_qspec.engine.frontend.trace import KEY, MORE, OMITTED, PREFILL
from sglang_qspec.engine.passes import tracing
from sglang_qspec.engine.passes.tracing import Items, PassTrace
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.trie import DraftTree, DraftTrees, Source
from test.engine.simulation import Clock
from test.engine.speculating import finish_pass, serve, tree_of

QUEUE, STEP = Source.QUEUE, Source.STEP
TREES = DraftTrees.of(
    [
        DraftTree((8, 9, 7, 10), (0, 0, 0, 1), (QUEUE, QUEUE, STEP, STEP), (1.0, 0.9, 0.5, 0.4)),
        DraftTree((8,), (0,), (QUEUE,), (1.0,)),
    ],
    4,
)


def request(rid: str = "a", **custom_params: Any) -> Any:
    """The part of SGLang's `Req` that the code reads."""
    params = SimpleNamespace(custom_params=custom_params or None)
    return SimpleNamespace(rid=rid, sampling_params=params, output_ids=[], customized_info=None)


def asking(rid: str = "a") -> Any:
    req = request(rid, qspec_return_trace=True)
    tracing.begin(req)
    return req


def items(req: Any) -> Items:
    found: Items = req.customized_info[KEY]
    return found


def record(req: Any, output_len: int, accepted: tuple[int, ...] = (1, 3)) -> None:
    """Record a pass over the first of TREES."""
    traced = PassTrace.of([req])
    assert traced is not None
    traced.record(
        [req],
        TREES,
        [accepted],
        [output_len],
        pipeline="ahead",
        batch_requests=2,
        batch_rows=8,
    )


@pytest.fixture
def active(link: FakeSidecarLink, clock: Clock) -> Iterator[Speculator]:
    yield serve(link, clock)
    speculation.deactivate()


def test_a_pass_describes_its_tree_without_the_root() -> None:
    req = asking()
    tracing.extend([req])
    record(req, 1)
    prefill, described, *more = items(req)
    assert (prefill, more) == (PREFILL, [MORE, MORE])
    assert described["pass"].pop("ms") > 0
    assert described == {
        "pass": {"rows": 4, "batch_requests": 2, "batch_rows": 8, "pipeline": "ahead"},
        "match_ids": [],
        "tree": {
            "ids": [9, 7, 10],
            "parents": [-1, -1, 0],
            "sources": ["queue", "step", "step"],
            "chances": [0.9, 0.5, 0.4],
        },
        "path": [0, 2],
    }


def test_a_pass_without_drafts_has_one_row() -> None:
    req, plain = asking("a"), asking("b")
    traced = PassTrace.of([req, plain])
    assert traced is not None
    traced.record([req], None, [[]], [0], pipeline="queue", batch_requests=2, batch_rows=2)
    traced.record(
        [plain], TREES.take([1]), [[]], [0], pipeline="queue", batch_requests=2, batch_rows=2
    )
    for one in (req, plain):
        (described,) = items(one)
        assert described["pass"]["rows"] == 1
        assert described["tree"] == {"ids": [], "parents": [], "sources": [], "chances": []}


def test_the_chances_and_the_match_are_those_of_the_moment_of_the_choice(
    active: Speculator,
) -> None:
    output_ids = [8, 9, 10]
    tree_of(active, "a", output_ids, 4)
    live = active.live("a")
    assert live is not None
    live.credit.observe(8.0, False)  # factor 4 / (4 + 8)
    req = asking()
    traced = PassTrace.of([req])
    assert traced is not None
    traced.look_up(active)
    live.credit.observe(8.0, False)
    finish_pass(active, ["a"], TREES.take([0]), [[]], [500])
    traced.record([req], TREES, [[]], [0], pipeline="queue", batch_requests=1, batch_rows=4)
    (described,) = items(req)
    assert described["tree"]["chances"] == pytest.approx([0.3, 0.1667, 0.1333])
    assert described["match_ids"] == [7, 8, 9, 10]  # the completion after the prompt's last token


def test_a_match_ends_at_its_maximum_length(active: Speculator) -> None:
    active.poll()
    output_ids = list(range(8, 20))
    tree_of(active, "a", output_ids, 4)
    live = active.live("a")
    assert live is not None
    assert live.match_ids(()) == [7, *output_ids]
    assert live.match_ids(list(Source)) == []


def test_a_chance_is_at_most_one() -> None:
    req = asking()
    traced = PassTrace.of([req])
    assert traced is not None
    traced._seen["a"] = 1.2, [4, 5]
    traced.record([req], TREES, [[1]], [0], pipeline="queue", batch_requests=1, batch_rows=4)
    described = items(req)[0]
    assert described["tree"]["chances"] == pytest.approx([1.0, 0.6, 0.48])
    assert described["match_ids"] == [4, 5]


def test_chunks_of_a_prompt_and_retractions_leave_one_item_for_each_token() -> None:
    req = asking()
    for _ in range(3):  # only the last chunk gives a token
        tracing.extend([req])
    assert items(req) == [PREFILL]
    req.output_ids = [1]
    record(req, 1)
    req.output_ids = [1, 2, 3, 4]
    tracing.begin(req)  # retracted, and queued again
    tracing.extend([req])
    assert [item in (PREFILL, MORE) for item in items(req)] == [True, False, True, True, True]
    assert items(req)[-1] == PREFILL
    record(req, 3, ())  # SGLang dropped tokens
    assert len(items(req)) == 4


def test_the_drafts_of_a_prefill_are_tokens_of_the_prefill() -> None:
    req = asking()
    tracing.extend([req], [0], [[1, 2]])
    assert items(req) == [PREFILL] * 3


@pytest.mark.parametrize(("cap", "most"), [("MAX_PASSES", 2), ("MAX_NODES", 7)])
def test_a_cap_omits_all_later_passes(monkeypatch: pytest.MonkeyPatch, cap: str, most: int) -> None:
    monkeypatch.setattr(tracing, cap, most)
    req = asking()
    for number in range(4):
        record(req, 2 * number, (1,))
    assert [item in (MORE, OMITTED) or "tree" in item for item in items(req)] == [True] * 8
    assert items(req)[4:] == [OMITTED, MORE] * 2
    plain = PassTrace.of([req])
    assert plain is not None
    plain.record([req], None, [[]], [8], pipeline="queue", batch_requests=1, batch_rows=1)
    assert items(req)[8:] == [OMITTED]


def test_nothing_is_recorded_for_requests_that_do_not_ask() -> None:
    silent, refusing = request(), request(qspec_return_trace=False)
    for req in (silent, refusing):
        tracing.begin(req)
    tracing.extend([silent, refusing])
    assert PassTrace.of([silent, refusing]) is None
    assert silent.customized_info is refusing.customized_info is None
    other = request("b")
    other.customized_info = {"other": [1]}
    traced = PassTrace.of([other, asking()])
    assert traced is not None
    traced.record([other], TREES, [[1]], [0], pipeline="queue", batch_requests=2, batch_rows=8)
    assert other.customized_info == {"other": [1]}


def test_customized_info_from_others_stays() -> None:
    req = request(qspec_return_trace=True)
    req.customized_info = {"other": [1]}
    tracing.begin(req)
    assert req.customized_info == {"other": [1], KEY: []}
