"""V(b, w) is the time of passes between two states of a server."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from benchmark.gpu_check import times
from benchmark.gpu_check.findings import Steps
from sglang_qspec.draft_source import SOURCES
from sglang_qspec.errors import ClientError
from sglang_qspec.tools.measure.pass_timer import PassTimer


class Server:
    """Counts a pass of `width` ms for each output token, and accepts widths up to 4."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.settings: dict[str, int] = {}
        self.asked: list[dict[str, Any]] = []
        self.counts = dict.fromkeys(("passes", "requests", "input_tokens", "seconds"), 0.0)

    def state(self) -> dict[str, Any]:
        idle = dict.fromkeys(self.counts, 0.0)
        return {"pipelines": {"queue": dict(self.counts), "ahead": idle}}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/set_internal_state":
            if body["server_args"].get("qspec_draft_token_num", 0) > 4:
                raise ClientError("HTTP 400: too wide")
            self.settings |= body["server_args"]
            return [True]
        self.asked.append(body)
        batch, passes = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        width = self.settings["qspec_draft_token_num"]
        self.counts["passes"] += passes
        self.counts["requests"] += batch * passes
        self.counts["input_tokens"] += batch * passes * width
        self.counts["seconds"] += 1e-3 * width * passes
        return []


def test_a_time_is_that_of_passes_of_the_batch_and_the_width() -> None:
    server: Any = Server()
    found = times.verify_time(server, PassTimer(server), [[1, 2], [3]], 2, 3)
    assert (found["ms"], found["mean_requests"], found["mean_width"]) == (3.0, 2.0, 3.0)
    assert {len(body["input_ids"]) for body in server.asked} == {2}


def test_a_width_that_the_server_refuses_is_left_out_and_named(monkeypatch: Any) -> None:
    server = Server()
    asked: list[tuple[str, ...]] = []

    class Configuration:
        def __init__(self, _name: str, _settings: object, flags: tuple[str, ...], _: Any) -> None:
            asked.append(flags)

        def server(self) -> Any:
            return nullcontext(server)

    monkeypatch.setattr(times, "Configuration", Configuration)
    monkeypatch.setattr(times, "Client", lambda _url: server)
    steps, chosen = Steps(), type("Settings", (), {"target_cores": ()})
    times.measure(steps, "demo", chosen, times.DUMMY, (1, 2))  # type: ignore[arg-type]
    assert list(steps.found.figures["demo"]["refused_widths"]) == [8, 16]
    rows = steps.found.figures["demo"]["rows"]
    assert {(row["width"], row["ms"]) for row in rows} == {(1, 1.0), (2, 2.0), (4, 4.0)}
    # Nothing but padding stands for drafts.
    assert {server.settings[f"qspec_source_{source}"] for source in SOURCES} == {0}
    # The server verifies one width, and captures each of them.
    (flags,) = asked
    assert dict(zip(flags[::2], flags[1::2], strict=True)) == {
        "--speculative-algorithm": "QSPEC",
        "--speculative-num-draft-tokens": "16",
        "--speculative-qspec-verify": "tree",
        "--speculative-qspec-graph-widths": "1,2,4,8",
        "--load-format": "dummy",
    }
