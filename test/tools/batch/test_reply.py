"""What a response means for its line, and the depth that a server's figures ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_qspec.errors import ClientError
from sglang_qspec.tools.batch.depth import MAX_DEPTH, YIELD, Load, depth_of, load_of, priority_of
from sglang_qspec.tools.batch.line import parse
from sglang_qspec.tools.batch.reply import reply_of
from sglang_qspec.tools.batch.server import ReplyKind

LINE = parse(1, b'{"prompt": "a"}')
FIGURES = {"spec_verify_ct": 5, "spec_num_correct_drafts": 7}
CHOICES = [{"index": 0, "text": "x", "finish_reason": "stop"}]
USAGE = {"completion_tokens": 13}


def answer(**fields: Any) -> bytes:
    return json.dumps({"id": "r", "choices": CHOICES, "usage": USAGE, **fields}).encode()


def test_an_answer_has_its_figures_and_loses_what_the_line_did_not_ask_for() -> None:
    reply = reply_of(200, answer(sglext={"spec_tokens_details": FIGURES}), LINE)
    assert reply.kind is ReplyKind.ANSWERED
    assert (reply.tokens, reply.passes, reply.accepted, reply.request_id) == (13, 5, 7, "r")
    assert json.loads(reply.body) == json.loads(answer())


def test_other_extensions_stay_in_the_answer() -> None:
    extension = {"spec_tokens_details": FIGURES, "routed_experts": "x"}
    reply = reply_of(200, answer(sglext=extension), LINE)
    assert json.loads(reply.body)["sglext"] == {"routed_experts": "x"}


def test_figures_stay_in_the_answer_of_a_line_that_asks_for_them() -> None:
    line = parse(1, b'{"prompt": "a", "return_spec_tokens_details": true}')
    reply = reply_of(200, answer(sglext={"spec_tokens_details": FIGURES}), line)
    assert json.loads(reply.body)["sglext"] == {"spec_tokens_details": FIGURES}


def test_the_figures_of_several_choices_add_up() -> None:
    extension = {"spec_tokens_details": [FIGURES, None, FIGURES]}
    reply = reply_of(200, answer(sglext=extension), LINE)
    assert (reply.passes, reply.accepted) == (10, 14)


def test_a_response_of_the_responses_endpoint_is_an_answer() -> None:
    line = parse(1, b'{"input": "a"}')
    usage = {"input_tokens": 2, "output_tokens": 5}
    found = {"id": "resp_1", "status": "incomplete", "output": [], "usage": usage}
    reply = reply_of(200, json.dumps(found).encode(), line)
    assert (reply.kind, reply.tokens, reply.request_id) == (ReplyKind.ANSWERED, 5, "resp_1")
    assert json.loads(reply.body) == found
    found["status"] = "failed"
    reply = reply_of(200, json.dumps(found).encode(), line)
    assert (reply.kind, reply.reason) == (ReplyKind.FAILED, "the response is failed")
    reply = reply_of(200, answer(), line)
    assert (reply.kind, reply.reason) == (ReplyKind.FAILED, "the answer has no output")


@pytest.mark.parametrize("extension", [None, {}, {"spec_tokens_details": None}, 7])
def test_a_server_without_speculation_reports_no_passes(extension: Any) -> None:
    reply = reply_of(200, answer(sglext=extension), LINE)
    assert (reply.kind, reply.passes, reply.tokens) == (ReplyKind.ANSWERED, 0, 13)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ReplyKind.REFUSED),
        (404, ReplyKind.REFUSED),
        (408, ReplyKind.FAILED),
        (429, ReplyKind.BUSY),
        (500, ReplyKind.FAILED),
        (503, ReplyKind.BUSY),
    ],
)
def test_a_status_says_whether_the_line_is_asked_again(status: int, kind: ReplyKind) -> None:
    reply = reply_of(status, b'{"error": {"message": "too long"}}', LINE)
    assert (reply.kind, reply.reason) == (kind, f"HTTP {status}: too long")
    assert json.loads(reply.body) == {"error": {"message": "too long"}}


def test_a_body_that_is_not_json_becomes_a_text() -> None:
    reply = reply_of(500, b"<html>\xff", LINE)
    assert json.loads(reply.body) == "<html>\ufffd"
    assert reply.reason == "HTTP 500: <html>\ufffd"


def test_an_aborted_answer_failed() -> None:
    data = json.dumps({"choices": [{"text": "half", "finish_reason": "abort"}]}, indent=1).encode()
    reply = reply_of(200, data, LINE)
    assert (reply.kind, reply.reason) == (ReplyKind.FAILED, "the server aborted the request")
    assert b"\n" not in reply.body


@pytest.mark.parametrize("data", [b"{}", b"7", b"<html>", b'{"choices": 7}'])
def test_a_response_without_choices_failed(data: bytes) -> None:
    reply = reply_of(200, data, LINE)
    assert (reply.kind, reply.reason) == (ReplyKind.FAILED, "the answer has no choices")
    json.loads(reply.body)


def scheduler(running: int | None, sidecar: str | None) -> dict[str, Any]:
    qspec = {} if sidecar is None else {"qspec": {"sidecar": sidecar}}
    return {"effective_max_running_requests_per_dp": running, **qspec}


@pytest.mark.parametrize(
    ("schedulers", "limit", "depth"),
    [
        ([scheduler(48, "ready")], None, 48 + 64),
        ([scheduler(48, "connecting")], None, 48 + 64),
        ([scheduler(48, "none")], None, 48 + 16),
        ([scheduler(48, None)], None, 48 + 16),
        ([scheduler(2, "ready"), scheduler(2, "ready")], None, 2 * (2 + 64)),
        ([scheduler(48, "ready")], 10, 48 + 10),
        ([scheduler(None, "ready")], None, 9 + 64),
    ],
)
def test_the_depth_is_running_requests_and_a_queue_to_draft_for(
    schedulers: list[dict[str, Any]], limit: int | None, depth: int
) -> None:
    info = {
        "max_running_requests": 9,
        "max_queued_requests": limit,
        "internal_states": schedulers,
    }
    assert depth_of(info) == depth


@pytest.mark.parametrize("running", [3 * 10**8, 2**70, 4097])
def test_no_claim_of_a_server_gives_it_more_than_4096_lines(running: int) -> None:
    assert depth_of({"internal_states": [scheduler(running, None)] * 3}) == MAX_DEPTH == 4096


@pytest.mark.parametrize(
    "info",
    [
        *(7, {}, {"internal_states": 7}, {"internal_states": []}, {"internal_states": [{}]}),
        *(
            {"internal_states": [{"effective_max_running_requests_per_dp": claim}]}
            for claim in (3e8, float("inf"), "48", -5, [48], {"a": 1})
        ),
    ],
)
def test_another_server_is_an_error(info: Any) -> None:
    with pytest.raises(ClientError, match="is not that of an SGLang server"):
        depth_of(info)


@pytest.mark.parametrize(
    ("info", "priority"),
    [
        ({}, None),
        ({"default_priority_value": 0}, None),
        ({"enable_priority_scheduling": True, "default_priority_value": None}, None),
        ({"enable_priority_scheduling": True, "default_priority_value": 5}, 5 - YIELD),
        (
            {
                "enable_priority_scheduling": True,
                "default_priority_value": 0,
                "schedule_low_priority_values_first": True,
            },
            YIELD,
        ),
    ],
)
def test_lines_come_after_requests_without_a_priority(
    info: dict[str, Any], priority: int | None
) -> None:
    assert priority_of(info) == priority


def test_the_load_is_that_of_all_schedulers() -> None:
    rank = {"num_running_reqs": 3, "num_waiting_reqs": 4, "max_running_requests": 8}
    assert load_of({"loads": [rank, rank]}) == Load(requests=14, slots=16)


@pytest.mark.parametrize(
    "loads", [7, {}, {"loads": 7}, {"loads": []}, {"loads": [{"num_running_reqs": "3"}]}]
)
def test_another_answer_has_no_load(loads: Any) -> None:
    assert load_of(loads) is None
