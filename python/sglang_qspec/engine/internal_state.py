"""Our part of SGLang's internal state: read by `/server_info`, changed by `/set_internal_state`."""

from __future__ import annotations

from typing import Any

from sglang_qspec.engine import knobs, speculator
from sglang_qspec.engine.knobs import Knobs
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.errors import RequestError

KEY = "qspec"
_exposed: tuple[Speculator, Knobs] | None = None


def expose(active: Speculator, current: Knobs) -> None:
    """The speculator and the knobs of this process's worker, from now on."""
    global _exposed
    _exposed = active, current


def describe(result: None, controller: Any, state: dict[str, Any]) -> None:
    """After `SchedulerInternalStateController._add_speculative`."""
    if _exposed is not None:
        active, current = _exposed
        state[KEY] = {
            "failed": speculator.active() is None,
            **active.describe(),
            "settings": vars(current),
        }


def add_handlers(handlers: dict[str, Any], controller: Any) -> None:
    """After `SchedulerInternalStateController._update_handlers`: its dict learns our knobs."""
    from sglang.srt.managers.scheduler_components.internal_state import _UpdateHandler

    if _exposed is not None:
        current = _exposed[1]
        handlers.update(dict.fromkeys(knobs.NAMES, _UpdateHandler(_no_check, current.set)))


def _no_check(name: str, value: float) -> None:
    """It was made where the request came in."""


def check_update(manager: Any, obj: Any) -> None:
    """Before `TokenizerManager.set_internal_state`: a wrong value of ours is a 400."""
    from fastapi import HTTPException

    args = manager.server_args
    if (args.speculative_algorithm or "").upper() != "QSPEC":
        return
    fixed = not str(args.device).startswith("cpu")
    try:
        knobs.check(obj.server_args, args.speculative_num_draft_tokens, graphs=fixed)
    except RequestError as error:
        raise HTTPException(400, str(error)) from None
