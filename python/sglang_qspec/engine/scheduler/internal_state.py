"""Our part of SGLang's internal state: read by `/server_info`, changed by `/set_internal_state`."""

from __future__ import annotations

from typing import Any

from sglang_qspec import config
from sglang_qspec.engine.failsafe import guarded
from sglang_qspec.engine.requests import runtime_settings, speculator
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
    """After `SchedulerInternalStateController._update_handlers`: its dict learns our knobs."""
    from sglang.srt.managers.scheduler_components.internal_state import _UpdateHandler

    if speculator.latest() is not None:
        handlers.update(dict.fromkeys(runtime_settings.NAMES, _UpdateHandler(_validate, _turn)))


def _validate(name: str, value: float) -> None:
    """Raise SGLang's UpdateRejected for a value that is not allowed, or after a failure.

    `check_update` has refused wrong values with a 400, unless that hook itself has failed.
    """
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
    from sglang.srt.runtime_context import get_device, get_spec

    active = speculator.active()
    if active is None:
        raise UpdateRejected(f"{name} cannot be set: speculation has failed and is off")
    try:
        runtime_settings.check(
            {name: value},
            active.settings,
            get_spec().speculative_num_draft_tokens,
            graphs=not str(get_device().device).startswith("cpu"),
        )
    except RequestError as error:
        raise UpdateRejected(str(error)) from None


def _turn(name: str, value: float) -> None:
    active = speculator.active()
    if active is not None:
        with guarded("a setting was changed"):
            active.turn(name, value)


def check_update(manager: Any, obj: Any) -> None:
    """Before `TokenizerManager.set_internal_state`: a wrong value of ours is a 400."""
    from fastapi import HTTPException
    from sglang.srt.runtime_context import get_spec

    args = manager.server_args
    if (args.speculative_algorithm or "").upper() != "QSPEC":
        return
    fixed = not str(args.device).startswith("cpu")
    settings, widest = config.from_environment(), get_spec().speculative_num_draft_tokens
    try:
        runtime_settings.check(obj.server_args, settings, widest, graphs=fixed)
    except RequestError as error:
        raise HTTPException(400, str(error)) from None
