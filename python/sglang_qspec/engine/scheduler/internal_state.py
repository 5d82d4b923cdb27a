"""QSPEC's part of SGLang's internal state.

`/server_info` shows it, and `/set_internal_state` changes the runtime settings and the endpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler
from sglang.srt.runtime_context import (
    attention_backends,
    get_device,
    get_lora,
    get_parallel,
    get_spec,
)

from sglang_qspec import config
from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.frontend import server_info
from sglang_qspec.engine.passes.launch import tree_attention
from sglang_qspec.engine.sidecar import endpoints
from sglang_qspec.errors import RequestError
from sglang_qspec.policy import runtime_settings

if TYPE_CHECKING:
    from sglang_qspec.engine.passes.worker import QSpecWorker

KEY = "qspec"


def describe(result: None, controller: Any, state: dict[str, Any]) -> None:
    """After `SchedulerInternalStateController._add_speculative`, on the scheduler's settings."""
    server_info.hide(state)
    latest = speculation.latest()
    if latest is not None:
        state[KEY] = {
            "dp_rank": get_parallel().dp_rank or 0,
            "failed": speculation.active() is None,
            **latest.describe(),
            "settings": latest.runtime_settings.describe(),
            "guess_limits": {
                "guesses": latest.settings.max_guesses,
                "tokens": latest.settings.max_guess_tokens,
            },
        }


def add_handlers(handlers: dict[str, Any], controller: Any) -> dict[str, Any] | None:
    """After `SchedulerInternalStateController._update_handlers`: add the runtime settings.

    SGLang calls it for each update. All ranks of a target must accept or refuse the same updates,
    because an update may also have settings of SGLang. Returns the handlers, or None for a server
    without QSPEC.
    """
    # The process that serves clients needs this module, but not the worker.
    from sglang_qspec.engine.passes.worker import QSpecWorker

    worker = controller.scheduler.model_worker
    if not isinstance(worker, QSpecWorker):
        return None
    validate = functools.partial(_validate, worker)
    change = _EndpointChange(worker)
    return _Handlers(
        {**handlers, **dict.fromkeys(runtime_settings.NAMES, _UpdateHandler(validate, _change))},
        _UpdateHandler(change.validate, change.apply),
    )


class _Handlers(dict[str, Any]):
    """The handlers of one update, with one handler for all names of endpoints."""

    def __init__(self, handlers: Mapping[str, Any], of_endpoints: Any) -> None:
        super().__init__(handlers)
        self._of_endpoints = of_endpoints

    def get(self, name: str, default: Any = None) -> Any:
        return self._of_endpoints if name.startswith(endpoints.PREFIX) else super().get(name)

    def __missing__(self, name: str) -> Any:
        if name.startswith(endpoints.PREFIX):
            return self._of_endpoints
        raise KeyError(name)


class _EndpointChange:
    """The endpoints after one update, which may add and remove several."""

    def __init__(self, worker: QSpecWorker) -> None:
        self._worker = worker
        self._planned = worker.endpoints

    def validate(self, name: str, value: float) -> None:
        """Plan one change. Raises SGLang's UpdateRejected for one that is not allowed."""
        _validate(self._worker, name, value)
        try:
            self._planned = endpoints.changed(self._planned, name, value)
        except RequestError as error:
            raise UpdateRejected(str(error)) from None

    def apply(self, name: str, value: float) -> None:
        """Make all planned changes; further calls find nothing to change."""
        self._worker.change_endpoints(self._planned)


def _validate(worker: QSpecWorker, name: str, value: float) -> None:
    """Raise SGLang's UpdateRejected for a value that is not allowed, or if speculation failed.

    `check_update` answers wrong values with HTTP 400; this check applies if that hook fails.
    """
    if not worker.speculates:
        raise UpdateRejected(f"{name} cannot be set: speculation failed, restart the server")
    try:
        device = str(get_device().device)
        _check({name: value}, config.from_environment(), device, get_parallel().tp_size)
    except RequestError as error:
        raise UpdateRejected(str(error)) from None


def _change(name: str, value: float) -> None:
    active = speculation.active()
    if active is not None:
        with guarded("changing a runtime setting"):
            active.change_setting(name, value)


def check_update(manager: Any, obj: Any) -> None:
    """Before `TokenizerManager.set_internal_state`: answer a wrong value with HTTP 400."""
    args = manager.server_args
    if not config.is_qspec(args):
        return
    try:
        _check(obj.server_args, config.from_environment(), str(args.device), args.tp_size)
    except RequestError as error:
        raise HTTPException(400, str(error)) from None


def _check(given: Mapping[str, Any], settings: QSpecConfig, device: str, ranks: int) -> None:
    """Check runtime settings of a target with this number of `ranks` on `device`.

    Raises RequestError for one that is not allowed.
    """
    endpoints.check(given, settings)
    verification = tree_attention.verification_of(settings, device, attention_backends()[1])
    runtime_settings.check(
        given,
        settings,
        get_spec().speculative_num_draft_tokens,
        ragged=verification.allowed,
        prefill_drafts=ranks == 1 and not get_lora().enable_lora,
    )
