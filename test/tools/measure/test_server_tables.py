"""`qspec measure` with faults that a real server seldom shows; its client is a fake.

test/engine/server/test_measure.py measures a real server.
"""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import ClientError, QSpecError
from sglang_qspec.tools.measure import server_tables
from sglang_qspec.tools.measure.server_tables import Measurement

SETTINGS: dict[str, Any] = {
    "mode": "auto",
    "draft_token_num": 4,
    "fixed_width": False,
    "ragged": True,
    "enabled": True,
    "source_step": True,
    "source_queue": True,
}


class FakeClient:
    """A server that runs at most `slots` requests at once and counts passes of one second."""

    def __init__(self, *, slots: int = 8, sidecar: str = "ready", drafts: bool = True) -> None:
        self.url = "http://server"
        self.slots, self.drafts, self.graphs = slots, drafts, False
        self.settings: dict[str, Any] = dict(SETTINGS)
        self.fails_at: str | None = None
        self.set_values: list[dict[str, int]] = []
        self.figures: dict[str, Any] = {
            "sidecar": sidecar,
            "eager_passes": 0,
            "step_passes": 0,
            "step_tokens": 0,
            "step_seconds": 0.0,
            "pipelines": {"ahead": {"passes": 0, "requests": 0, "seconds": 0.0}},
        }

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({**self.figures, "settings": self.settings})

    def info(self) -> tuple[str, list[dict[str, Any]]]:
        return "target", [self.state()]

    def chat_ids(self, message: str) -> list[int]:
        return list(range(20))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/set_internal_state":
            self.set_values.append(body["server_args"])
            return [True]
        if path == "/flush_cache":
            raise ClientError("the answer is not JSON")
        texts, params = body["input_ids"], body["sampling_params"]
        tokens = params["max_new_tokens"]
        if self.fails_at == "signal":
            signal.raise_signal(signal.SIGTERM)
        if self.fails_at == "trace" and "custom_params" in params:
            raise ClientError("the server has ended")
        passes, batch = tokens - 1, min(self.slots, len(texts))
        counts = self.figures["pipelines"]["ahead"]
        counts["passes"] += passes
        counts["requests"] += passes * batch
        counts["seconds"] += float(passes)
        self.figures["eager_passes"] += 0 if self.graphs else passes
        if self.drafts:
            # The prompts of each answer are read at the pace of 0.01 s a token.
            self.figures["step_seconds"] += 0.01 * sum(map(len, texts))
            self.figures["step_passes"] += 2 * passes
            self.figures["step_tokens"] += 2 * passes * batch
            self.figures["step_seconds"] += 0.5 * passes
        tree = {"parents": [-1, 0, 1], "accepted": [True, True, False]}
        nothing: dict[str, Any] = {"parents": [], "accepted": []}
        trace = {"passes": [{"tree": tree if self.drafts else nothing}] * 5}
        return [{"meta_info": {"qspec_trace": trace}} for _ in texts]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    return use(FakeClient(), monkeypatch)


def use(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    monkeypatch.setattr(server_tables, "Client", lambda _: client)
    monkeypatch.setattr(server_tables, "HEARTBEAT_S", 0.0)
    return client


def measurement() -> Measurement:
    return Measurement("http://server", ["one", "two"], 16)


def restored(client: FakeClient) -> bool:
    """Whether the last change of the settings gives all of them their first values."""
    first = {f"qspec_{name}": int(value) for name, value in SETTINGS.items() if name != "mode"}
    return client.set_values[-1] == {**first, "qspec_mode": 4}


def test_the_figures_come_from_the_counters(client: FakeClient) -> None:
    found = measurement().tables([1, 2], machine="here", gpus=(2, 1))
    assert {(row.requests, row.width): row.seconds for row in found.verify} == {
        (b, width): 1.0 for b in (1, 2) for width in (1, 2, 4)
    }
    assert [row.rows for row in found.draft_steps] == [1.0, 2.0]
    assert [row.seconds for row in found.draft_steps] == pytest.approx([0.25, 0.25])
    assert found.draft_prefill_token == pytest.approx(0.01)
    assert found.agreement["step"] == ["110" * 5] * 2
    assert found.slowdown == 1.0
    assert (found.machine, found.on_gpu, found.gpus.target) == ("here", False, 2)
    assert restored(client)


def test_a_gpu_may_have_run_some_passes_without_a_graph(client: FakeClient) -> None:
    client.graphs, client.figures["eager_passes"] = True, 3
    assert measurement().tables([1]).on_gpu


def test_a_server_with_several_schedulers_is_refused(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "info", lambda: ("target", [client.state()] * 2))
    with pytest.raises(ClientError, match="http://server has 2 schedulers, but must have one"):
        measurement().tables([1])
    assert not client.set_values


def test_sigterm_restores_the_settings(client: FakeClient, tmp_path: Path) -> None:
    client.fails_at = "signal"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["measure", "--output", str(tmp_path / "tables.json")])
    assert ended.value.code == 128 + signal.SIGTERM
    assert restored(client)
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_output_without_a_folder_is_refused_before_the_measurement(
    client: FakeClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "none" / "tables.json"
    assert main(["measure", "--output", str(output)]) == 1
    assert f"--output is {output}, but its folder does not exist" in capsys.readouterr().err
    assert not client.set_values


def test_a_server_that_runs_fewer_requests_at_once_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = use(FakeClient(slots=2), monkeypatch)
    with pytest.raises(ClientError, match=r"--requests is 8, but the server runs 2\.0 requests"):
        measurement().tables([1, 8])
    assert restored(client)


def test_a_sidecar_that_is_not_ready_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client = use(FakeClient(sidecar="lost"), monkeypatch)
    with pytest.raises(ClientError, match="is 'lost', but must be 'ready'"):
        measurement().tables([1])
    assert not client.set_values


def test_a_sidecar_that_drafts_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    client = use(FakeClient(drafts=False), monkeypatch)
    with pytest.raises(ClientError, match="the sidecar drafted nothing"):
        measurement().tables([1])
    assert restored(client)


def test_settings_are_restored_after_an_error(client: FakeClient) -> None:
    client.fails_at = "trace"
    with pytest.raises(QSpecError, match="the server has ended"):
        measurement().tables([1])
    assert restored(client)
