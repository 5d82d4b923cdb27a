"""The server starts its own sidecar, at once or after the target has sized its KV."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculation
from sglang_qspec.engine.placement import environment
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.engine.scheduler import lifecycle
from sglang_qspec.engine.sidecar import startup
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import keys
from sglang_qspec.messages import PROTOCOL, Hello
from sglang_qspec.sidecar.child_process import SidecarProcess
from sglang_qspec.sidecar.options import parser
from sglang_qspec.trie import TrieLimits, TrieStore


@pytest.fixture
def spec() -> SimpleNamespace:
    """The part of SGLang's settings that a start reads."""
    return SimpleNamespace(
        _speculative_draft_quantization_explicitly_set=False,
        speculative_draft_model_revision=None,
        speculative_draft_attention_backend=None,
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, spec: SimpleNamespace) -> list[list[str]]:
    """The command lines of the sidecars that the code starts; no process starts."""
    commands: list[list[str]] = []
    monkeypatch.setattr(SidecarProcess, "start", lambda process: commands.append(process.command))
    monkeypatch.setattr(startup, "get_spec", lambda: spec)
    monkeypatch.setattr(startup, "get_model", lambda: SimpleNamespace(trust_remote_code=False))
    monkeypatch.setattr("atexit.register", mock.Mock())
    monkeypatch.delenv("SGLANG_QSPEC_PLACEMENT", raising=False)
    return commands


def start(gpu_id: int = 0, **settings: Any) -> Opened:
    """Start a sidecar, and close the link to it."""
    hello = Hello(PROTOCOL, 1, "f")
    opened = startup._start_own(QSpecConfig(**settings), "/m", hello, gpu_id)
    for link in opened.links:
        link.close()
    return opened


def use(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process speculate with these sidecars."""
    speculator = Speculator(QSpecConfig(), 10, TrieStore(TrieLimits(vocab_size=10)), opened)
    monkeypatch.setattr(speculation, "_latest", speculator)
    monkeypatch.setattr(speculation, "_failed", False)


def test_a_sidecar_on_the_targets_gpu_starts_after_the_target_has_sized_its_kv(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_QSPEC_PLACEMENT", "")  # restored at the end
    environment.write(Placement("cuda:0", True, 0.2))
    use(start(), monkeypatch)
    assert not started
    lifecycle.started(None, None)
    assert {"--device=cuda:0", "--mem-fraction=0.2"} <= set(started[0])
    lifecycle.started(None, None)
    assert len(started) == 1


def test_sglangs_flag_for_the_draft_models_attention_backend_reaches_the_sidecar(
    started: list[list[str]], spec: SimpleNamespace
) -> None:
    start(draft_device="cpu")
    spec.speculative_draft_attention_backend = "triton"
    start(draft_device="cpu")
    without, given = started
    assert not any(argument.startswith("--attention-backend") for argument in without)
    assert "--attention-backend=triton" in given
    options = parser().parse_args(given[3:])
    assert options.attention_backend == "triton"


def test_a_sidecar_on_a_device_of_its_own_starts_at_once(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_QSPEC_PLACEMENT", "")
    environment.write(Placement("cuda:1"))
    start()
    assert {"--device=cuda:1", "--mem-fraction=0.0"} <= set(started[0])


def test_a_key_file_is_for_tcp_endpoints_alone(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other end of an ipc socket is started without the file, and both ends must agree."""
    created = keys.create(tmp_path / "key")
    key_file = str(tmp_path / "key")
    start(key_file=key_file)
    assert not any(argument.startswith("--key-file") for argument in started[0])
    given: dict[str, keys.Keys | None] = {}

    def connect(endpoint: str, _: Hello, pair: keys.Keys | None) -> str:
        given[endpoint] = pair
        return endpoint

    monkeypatch.setattr(startup, "SidecarLink", connect)
    monkeypatch.setattr(startup, "_hello", lambda *_: Hello(PROTOCOL, 1, "f"))
    monkeypatch.setattr(startup, "_join", lambda endpoints, connect: list(map(connect, endpoints)))
    startup.open_links(QSpecConfig(endpoint="ipc:///q/a,tcp://h:1", key_file=key_file), 0)
    assert given == {"ipc:///q/a": None, "tcp://h:1": created}


def test_without_a_placement_the_sidecar_is_on_the_targets_device(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    assert {"--device=cpu", "--mem-fraction=0.15"} <= set(started[0])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    use(start(3), monkeypatch)
    lifecycle.started(None, None)
    assert "--device=cuda:3" in started[1]
    start(3, draft_device="cuda:1", mem_fraction=0.4)
    assert {"--device=cuda:1", "--mem-fraction=0.4"} <= set(started[2])
