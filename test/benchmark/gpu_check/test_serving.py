"""The passes of a server are counted by its own counter, or by SGLang's log."""

from __future__ import annotations

from typing import Any

import pytest

from benchmark.gpu_check import serving
from benchmark.gpu_check.serving import LOGGING, Passes, captured, logged, passes_of

LOG = """\
[2026-11-23 03:00:00] Prefill batch, #new-seq: 2, #cached-token: 0, cuda graph: False
[2026-11-23 03:00:01] Decode batch, #running-req: 2, #token: 90, accept len: 2.10, cuda graph: True
[2026-11-23 03:00:02] Decode batch, #running-req: 2, #token: 94, cuda graph: False, gen throughput
[2026-11-23 03:00:03] Decode batch, #running-req: 1, #token: 40, cpu graph: False, gen throughput
"""


class Server:
    """A server that has only a state and a log."""

    def __init__(self, state: dict[str, Any], log: str) -> None:
        self.state, self.log = state, log

    def get(self, path: str, timeout: float) -> Any:
        return {"internal_states": [{"qspec": self.state}]}


def test_the_log_tells_decode_passes_in_and_outside_graphs() -> None:
    assert logged(LOG) == Passes(3, 2)
    assert logged("") == Passes(0, 0)


def test_a_counter_of_the_server_wins_over_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOG_SECONDS", 0.0)
    pipelines = {"queue": {"passes": 4}, "ahead": {"passes": 5}}
    server: Any = Server({"pipelines": pipelines}, LOG)
    assert passes_of(server) == Passes(3, 2)
    server.state["eager_passes"] = 1
    assert passes_of(server) == Passes(9, 1)
    assert Passes(9, 3).since(Passes(4, 1)) == Passes(5, 2)


def test_sglangs_reporter_logs_in_this_form() -> None:
    """The source of the installed release has the label and the flag."""
    import inspect

    from sglang.srt.managers.scheduler_components import metrics_reporter

    source = inspect.getsource(metrics_reporter.SchedulerMetricsReporter.report_decode_stats)
    source += inspect.getsource(metrics_reporter.SchedulerMetricsReporter._init_metrics)
    assert "Decode batch" in source
    assert "_graph_backend_label}: {can_run_cuda_graph}" in source
    assert '"cuda graph"' in source
    assert "decode_log_interval" in source
    assert LOGGING[2:] == ("--decode-log-interval", "1")


def test_the_log_says_what_was_captured_and_what_did_not_fit() -> None:
    """The source has both messages."""
    import inspect

    from sglang_qspec.engine.cuda import pass_graphs

    source = inspect.getsource(pass_graphs)
    for start in ("Target passes run in CUDA graphs", "No CUDA graphs for width"):
        assert start in source
        assert captured(f"[03:00 INFO] {start}: 3 s\nmore") == [f"{start}: 3 s"]
    assert captured("cuda graph: True") == []
