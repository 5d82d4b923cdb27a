"""QSPEC's part of SGLang's internal state.

`/server_info` shows it, and `/set_internal_state` changes the runtime settings in it.
"""

from __future__ import annotations

from typing import Any

from sglang_qspec import config
from sglang_qspec.engine import speculator
from sglang_qspec.engine.failsafe import guarded
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
    from sglang.srt.runtime_context import get_spec

    active = speculator.active()
    if active is None:
        raise UpdateRejected(f"{name} cannot be set: speculation failed, restart the server")
    try:
        runtime_settings.check(
            {name: value},
            active.settings,
            get_spec().speculative_num_draft_tokens,
        )
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
    from sglang.srt.runtime_context import get_spec

    args = manager.server_args
    if (args.speculative_algorithm or "").upper() != "QSPEC":
        return
    settings, widest = config.from_environment(), get_spec().speculative_num_draft_tokens
    try:
        runtime_settings.check(obj.server_args, settings, widest)
    except RequestError as error:
        raise HTTPException(400, str(error)) from None
