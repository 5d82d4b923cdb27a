"""Nobody reads a server's keys in /server_info. `test_router` asks real servers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import common

from sglang_qspec.engine import speculation
from sglang_qspec.engine.frontend import server_info
from sglang_qspec.engine.scheduler import internal_state

SECRETS = {
    "api_key": "key of clients",
    "admin_api_key": "key of clients, and more",
    "ssl_keyfile_password": "key of TLS",
}


class Args:
    """The part of `ServerArgs` that `build_server_info` reads."""

    kv_events_config = None

    def __init__(self, algorithm: str | None) -> None:
        flags = [f"--{name.replace('_', '-')}={secret}" for name, secret in SECRETS.items()]
        self.launch_command = " ".join(["sglang", *flags, "--port=1"])
        self._settings = {"speculative_algorithm": algorithm, "port": 1, **SECRETS}

    def resolved_dict(self) -> dict[str, Any]:
        return dict(self._settings)


@pytest.fixture(autouse=True)
def _no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "describe_kv_events_publisher", lambda _: None)


def shown_by(algorithm: str | None) -> dict[str, Any]:
    args = Args(algorithm)
    shown: dict[str, Any] = common.build_server_info(args, {"max_total_num_tokens": 5})
    server_info.hide_in_server(shown, args, {})
    return shown


@pytest.mark.parametrize("algorithm", ["QSPEC", "qspec"])
def test_the_server_shows_its_settings_without_secrets(algorithm: str) -> None:
    shown = shown_by(algorithm)
    assert (shown["port"], shown["max_total_num_tokens"]) == (1, 5)
    assert "--admin-api-key=<redacted> " in shown["launch_command"]
    assert shown["launch_command"].endswith("--port=1")
    assert not [secret for secret in SECRETS.values() if secret in json.dumps(shown)]
    assert "and more" not in shown["launch_command"]


def test_the_schedulers_settings_have_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "latest", lambda: None)
    state = Args("QSPEC").resolved_dict()
    internal_state.describe(None, None, state)
    assert set(map(state.get, SECRETS)) == {"<redacted>"}


def test_a_server_with_another_algorithm_is_left_alone() -> None:
    assert shown_by("EAGLE") == shown_by(None) | {"speculative_algorithm": "EAGLE"}
    assert shown_by(None)["api_key"] == SECRETS["api_key"]


def test_no_other_setting_of_sglang_is_a_secret() -> None:
    """A setting whose name says so is a secret, a file, or hidden by SGLang."""
    words = ("api_key", "password", "secret", "credential")
    named = {name for name in ServerArgs.__struct_fields__ if any(word in name for word in words)}
    assert named == set(server_info.SECRETS)
