"""The passes of a server, and its messages about CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmark.gpu_check.serving import Passes, captured, passes_of


def test_the_passes_of_all_pipelines_are_counted() -> None:
    pipelines = {"queue": {"passes": 4}, "ahead": {"passes": 5}}
    info = {"internal_states": [{"qspec": {"pipelines": pipelines, "eager_passes": 1}}]}
    server: Any = SimpleNamespace(get=lambda *_: info)
    assert passes_of(server) == Passes(9, 1)
    assert Passes(9, 3).since(Passes(4, 1)) == Passes(5, 2)


def test_the_log_says_what_was_captured_and_what_did_not_fit() -> None:
    """The source has both messages."""
    import inspect

    from sglang_qspec.engine.cuda import pass_graphs

    source = inspect.getsource(pass_graphs)
    for start in ("Target passes run in CUDA graphs", "No CUDA graphs for width"):
        assert start in source
        assert captured(f"[03:00 INFO] {start}: 3 s\nmore") == [f"{start}: 3 s"]
    assert captured("cuda graph: True") == []
