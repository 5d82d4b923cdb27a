"""The CPUs of the ranks of each server that this process starts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.config import variable
from sglang_qspec.engine.boundary import refusal
from sglang_qspec.engine.cpu import defaults, ranks
from sglang_qspec.engine.placement import core_division
from sglang_qspec.errors import ConfigError

BIND = "SGLANG_CPU_OMP_THREADS_BIND"
QSPEC = {"speculative_algorithm": "QSPEC", "speculative_draft_model_path": "draft"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores with one hardware thread each, and no placement by the user."""
    monkeypatch.setenv(BIND, "")  # so that the variable is restored
    monkeypatch.delenv(BIND)
    monkeypatch.setattr(refusal, "_on_command_line", False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(ranks, "get_cpu_ids_by_node", lambda: ["0-7"])
    monkeypatch.setattr(
        core_division, "cores_of", lambda cpus: [frozenset((cpu,)) for cpu in sorted(cpus)]
    )
    monkeypatch.setattr(defaults, "resolving_view", lambda args: args)
    monkeypatch.setattr(defaults, "declare_resolution", lambda *_, **__: None)


def start(tp_size: int, **fields: Any) -> str | None:
    """Resolve the arguments of a server. Returns the CPUs of its ranks."""
    plain: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "qspec_cpu",
        "lora_backend": "torch_native",
        "tp_size": tp_size,
        "dp_size": 1,
        "pp_size": 1,
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
    }
    defaults._choose(SimpleNamespace(**{**plain, **fields}), lambda _: None)
    return os.environ.get(BIND)


def test_each_server_of_a_process_places_its_own_ranks() -> None:
    assert start(2) == "0,1,2,3|4,5,6,7"
    assert start(4) == "0,1|2,3|4,5|6,7"
    assert start(1) is None, "nobody has placed the only rank"


def test_the_users_own_groups_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    start(2)
    monkeypatch.setenv(BIND, "0|1")
    for tp_size in (2, 1):
        assert start(tp_size) == "0|1"


def test_only_a_sidecar_of_qspec_keeps_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(2, **QSPEC) == "0,1,2|3,4,5"
    assert start(2, **{**QSPEC, "speculative_algorithm": "EAGLE"}) == "0,1,2,3|4,5,6,7"
    monkeypatch.setenv(variable("cores"), "0,1")
    assert start(2, **QSPEC) == "2,3,4|5,6,7"


def test_a_wrong_setting_is_refused_by_a_server_with_qspec_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable("width"), "broad")
    assert start(1) is None
    assert start(2) == "0,1,2,3|4,5,6,7"
    with pytest.raises(ConfigError, match="is 'broad', but must be"):
        start(2, **QSPEC)
    monkeypatch.setattr(refusal, "_on_command_line", True)
    with pytest.raises(SystemExit):
        start(2, **QSPEC)
    assert "error: SGLANG_QSPEC_WIDTH is 'broad', but must be" in capsys.readouterr().err
