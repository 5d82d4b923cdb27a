"""The verdict on a request, on made-up responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmark.soak.answers import Answer, streamed, whole
from benchmark.soak.asking import Response
from benchmark.soak.mix import Fate, Request
from benchmark.soak.templates import CHAT, GENERATE, Template
from benchmark.soak.verdict import Kind, judge

LENGTH = {"type": "length", "length": 3}


def item(
    text: str = "one two three",
    ids: tuple[int, ...] = (1, 2, 3),
    reason: dict[str, Any] | None = LENGTH,
    index: int = 0,
) -> dict[str, Any]:
    """An answer of /generate, or a streamed chunk of it."""
    meta = {"finish_reason": reason, "prompt_tokens": 4, "completion_tokens": len(ids)}
    return {"index": index, "text": text, "output_ids": list(ids), "meta_info": meta}


def request(fate: Fate = Fate.FINISH, path: str = GENERATE, **sampling: Any) -> Request:
    template = Template(path, "x", {"temperature": 0, "max_new_tokens": 3, **sampling}, 0)
    return Request(1, template, {}, fate)


def response(data: Any, **fields: Any) -> Response:
    made = Response(200, data, isinstance(data, list), False, None, 0.1)
    return replace(made, **fields)


REFERENCE = whole(GENERATE, item())


def kind(asked: Request, found: Response, reference: Answer | None = REFERENCE) -> Kind:
    verdict = judge(asked, found, reference)
    assert bool(verdict.reason) == verdict.violated
    return verdict.kind


def test_an_answer_equal_to_the_reference_passes_streamed_or_not() -> None:
    assert kind(request(), response(item())) is Kind.WHOLE
    pieces = [item("one", (1,), None), item("one two", (1, 2), None), item()]
    assert kind(request(), response(pieces)) is Kind.WHOLE


@pytest.mark.parametrize(
    "other",
    [
        item("one two four"),
        item(ids=(1, 2, 4)),
        item("one two", (1, 2)),
        item(reason={"type": "stop", "matched": "t"}),
        {**item(), "meta_info": {**item()["meta_info"], "prompt_tokens": 5}},
    ],
)
def test_any_difference_from_the_reference_is_a_change(other: dict[str, Any]) -> None:
    assert kind(request(), response(other)) is Kind.CHANGED
    assert kind(request(), response([other])) is Kind.CHANGED


def test_a_sampled_answer_may_differ_but_must_fit_its_request() -> None:
    assert kind(request(), response(item("one two four")), None) is Kind.WHOLE
    assert kind(request(), response(item(ids=(1, 2, 3, 4))), None) is Kind.FAILED
    assert kind(request(n=2), response(item()), None) is Kind.FAILED
    assert kind(request(n=2), response([item(), item(index=1)]), None) is Kind.WHOLE
    stopped = item(reason={"type": "stop", "matched": 2})
    assert kind(request(), response(stopped), None) is Kind.WHOLE
    assert kind(request(ignore_eos=True), response(stopped), None) is Kind.FAILED
    miscounted = {**item(), "meta_info": {**item()["meta_info"], "completion_tokens": 2}}
    assert kind(request(), response(miscounted), None) is Kind.FAILED


@pytest.mark.parametrize(
    "found",
    [
        response("busy", status=500),
        response("bad request", status=400),
        response(None, status=None, error="ConnectionResetError"),
        response([item()], error="ValueError: the stream ended before [DONE]"),
        response([], error="no answer in 1200 s"),
        response({"text": "no meta_info"}),
        response("not JSON"),
        response([item("one", (1,), None)]),
        response(item("one", (1,), {"type": "abort", "message": "?"})),
    ],
)
@pytest.mark.parametrize("reference", [REFERENCE, None])
def test_an_incomplete_answer_fails(found: Response, reference: Answer | None) -> None:
    assert kind(request(), found, reference) is Kind.FAILED


def test_a_bad_request_must_be_refused() -> None:
    asked = request(Fate.BAD)
    assert kind(asked, response({"error": "no"}, status=400)) is Kind.REFUSED
    assert kind(asked, response(item())) is Kind.FAILED
    assert kind(asked, response("broken", status=500)) is Kind.FAILED


def test_a_client_that_hangs_up_has_a_correct_prefix() -> None:
    asked = request(Fate.HANG_UP)
    assert kind(asked, response(None, status=None, hung_up=True)) is Kind.CUT
    assert kind(asked, response([], hung_up=True)) is Kind.CUT
    assert kind(asked, response([item("one", (1,), None)], hung_up=True)) is Kind.CUT
    assert kind(asked, response([item("two", (2,), None)], hung_up=True)) is Kind.CHANGED
    # The answer arrived before the client hung up.
    assert kind(asked, response(item())) is Kind.WHOLE
    assert kind(asked, response(item("one two four"))) is Kind.CHANGED
    assert kind(asked, response("broken", status=500)) is Kind.FAILED
    assert kind(asked, response(None, status=None, error="reset")) is Kind.FAILED


def test_an_aborted_request_reports_the_abort_or_has_a_correct_prefix() -> None:
    asked = request(Fate.ABORT)
    aborted = {"type": "abort", "message": "Aborted"}
    assert kind(asked, response(item("one", (1,), aborted))) is Kind.CUT
    assert kind(asked, response(item("two", (2,), aborted))) is Kind.CHANGED
    assert kind(asked, response(item("", (), aborted))) is Kind.CUT
    waiting = {"finish_reason": aborted, "completion_tokens": 0}
    assert kind(asked, response({**item("", ()), "meta_info": waiting})) is Kind.CUT
    assert kind(asked, response("Abort in waiting queue", status=503)) is Kind.CUT
    assert kind(asked, response("out of memory", status=503)) is Kind.FAILED
    assert kind(asked, response("Abort", status=500)) is Kind.FAILED
    assert kind(request(), response("Abort in waiting queue", status=503)) is Kind.FAILED


def piece(
    text: str, reason: str | None = None, matched: str | None = None, index: int = 0
) -> dict[str, Any]:
    """A chunk of a chat."""
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return {"choices": [{**choice, "matched_stop": matched}]}


def test_cut_text_must_begin_the_reference_or_hold_a_part_of_its_stop_string() -> None:
    asked = request(Fate.HANG_UP, CHAT)

    def cut(text: str, *reference: dict[str, Any]) -> Kind:
        return kind(asked, response([piece(text)], hung_up=True), streamed(CHAT, reference))

    whole_text = (piece("a boat"), piece(" comes", "length"))
    assert cut("a boat", *whole_text) is Kind.CUT
    assert cut("a goat", *whole_text) is Kind.CHANGED
    assert cut("a boat comes in", *whole_text) is Kind.CHANGED
    stopped = piece("a boat", "stop", " and")
    assert cut("a boat an", stopped) is Kind.CUT
    assert cut("a goat", stopped) is Kind.CHANGED


def test_streams_of_several_answers_are_joined_by_index() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5}}
    pieces = [piece("x", index=1), piece("a"), piece("b", "stop"), piece("y", "length", index=1)]
    pieces.append(usage)
    found = streamed(CHAT, pieces)
    choices = [
        {"index": 1, "message": {"content": "xy"}, "finish_reason": "length"},
        {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop", "matched_stop": None},
    ]
    assert found == whole(CHAT, {"choices": choices, "usage": usage["usage"]})
    assert [part.text for part in found.parts] == ["ab", "xy"]
    both = [item("a", (1,), None, 0), item("x", (1,), None, 1), item("b", index=0), item(index=1)]
    assert streamed(GENERATE, both) == whole(GENERATE, [item("b"), item()])
