"""QSPEC's part of SGLang's internal state.

`/server_info` shows it, and `/set_internal_state` changes the runtime settings in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_qspec import config
from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculator
from sglang_qspec.engine.failsafe import guarded
from sglang_qspec.engine.passes import tree_attention
from sglang_qspec.engine.requests import runtime_settings
from sglang_qspec.errors import RequestError

KEY = "qspec"


def describe(result: None, controller: Any, state: dict[str, Any]) -> None:
    """After `SchedulerInternalStateController._add_speculative`."""
    latest = speculator.latest()
    if latest is not None:
        state[KEY] = {
            "failed": speculator.active() is None,
            **latest.describe(),
            "settings": vars(latest.runtime_settings),
        }


def add_handlers(handlers: dict[str, Any], controller: Any) -> None:
    """After `SchedulerInternalStateController._update_handlers`: add the runtime settings."""
    from sglang.srt.managers.scheduler_components.internal_state import _UpdateHandler

    if speculator.latest() is not None:
        handlers.update(dict.fromkeys(runtime_settings.NAMES, _UpdateHandler(_validate, _change)))


def _validate(name: str, value: float) -> None:
    """Raise SGLang's UpdateRejected for a value that is not allowed, or if speculation failed.

    `check_update` answers wrong values with HTTP 400; this check applies if that hook fails.
    """
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
    from sglang.srt.runtime_context import get_device

    active = speculator.active()
    if active is None:
        raise UpdateRejected(f"{name} cannot be set: speculation failed, restart the server")
    try:
        _check({name: value}, active.settings, str(get_device().device))
    except RequestError as error:
        raise UpdateRejected(str(error)) from None


def _change(name: str, value: float) -> None:
    active = speculator.active()
    if active is not None:
        with guarded("changing a runtime setting"):
            active.change_setting(name, value)


def check_update(manager: Any, obj: Any) -> None:
    """Before `TokenizerManager.set_internal_state`: answer a wrong value with HTTP 400."""
    from fastapi import HTTPException

    args = manager.server_args
    if (args.speculative_algorithm or "").upper() != "QSPEC":
        return
    try:
        _check(obj.server_args, config.from_environment(), str(args.device))
    except RequestError as error:
        raise HTTPException(400, str(error)) from None


def _check(given: Mapping[str, Any], settings: QSpecConfig, device: str) -> None:
    """Check runtime settings on `device`. Raises RequestError for one that is not allowed."""
    from sglang.srt.runtime_context import attention_backends, get_spec

    verification = tree_attention.verification_of(settings, device, attention_backends()[1])
    runtime_settings.check(
        given,
        settings,
        get_spec().speculative_num_draft_tokens,
        ragged=verification.allowed,
    )
