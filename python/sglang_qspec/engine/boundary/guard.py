"""Wraps each hook so that an exception in the hook does not reach SGLang.

A guard passes on exceptions that the target raises. If an AROUND hook fails after it called the
target, the guard returns the target's result and does not call the target again.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_qspec.engine.boundary import failsafe
from sglang_qspec.engine.boundary.hook import Hook, OnError

logger = logging.getLogger(__name__)


def guarded_hook(hook: Hook) -> Callable[..., Any]:
    """The function to register: the hook's own, or a wrapper with it as `__wrapped__`."""
    if hook.on_error is OnError.STOP_START:
        return hook.function
    report = _Report(hook)
    if hook.kind is not HookType.AROUND:
        return _beside(hook, report)
    if inspect.iscoroutinefunction(hook.function):
        return _around_async(hook, report)
    return _around(hook, report)


class _Report:
    """Logs errors of one hook: the first at ERROR, later ones at DEBUG as they may recur."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._reported = False

    def __call__(self) -> None:
        """Log the exception being handled, and end speculation if the hook's row says so."""
        hook = self._hook
        what = f"the hook {hook.function.__name__} on {hook.target.rpartition('.')[2]}"
        if hook.on_error is OnError.END_SPECULATION:
            failsafe.end_speculation(f"running {what}")
            return
        level = logging.DEBUG if self._reported else logging.ERROR
        self._reported = True
        logger.log(
            level,
            "Error in %s: %s. Later errors in this hook are logged at level DEBUG",
            what,
            hook.on_error.value,
            exc_info=True,
        )


def _beside(hook: Hook, report: _Report) -> Callable[..., Any]:
    """Guard of a BEFORE or AFTER hook: after an error SGLang keeps its arguments or result."""

    @functools.wraps(hook.function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook.function(*args, **kwargs)
        except hook.deliberate:
            raise
        except Exception:
            report()
            return None

    return guarded


@dataclass
class _FirstCall:
    """Outcome of the first call of the target by its AROUND hook; later calls are not recorded."""

    made: bool = False
    result: Any = None
    error: Exception | None = None


def _around(hook: Hook, report: _Report) -> Callable[..., Any]:
    @functools.wraps(hook.function)
    def guarded(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = _FirstCall()

        def watched(*args: Any, **kwargs: Any) -> Any:
            if first.made:
                return target(*args, **kwargs)
            first.made = True
            try:
                first.result = target(*args, **kwargs)
            except Exception as error:
                first.error = error
                raise
            return first.result

        try:
            return hook.function(watched, *args, **kwargs)
        except Exception as error:
            if error is first.error or isinstance(error, hook.deliberate):
                raise
            report()
        if first.error is not None:
            raise first.error
        return first.result if first.made else target(*args, **kwargs)

    return guarded


def _around_async(hook: Hook, report: _Report) -> Callable[..., Any]:
    """`_around` for a coroutine function with a coroutine target."""

    @functools.wraps(hook.function)
    async def guarded(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = _FirstCall()

        async def watched(*args: Any, **kwargs: Any) -> Any:
            if first.made:
                return await target(*args, **kwargs)
            first.made = True
            try:
                first.result = await target(*args, **kwargs)
            except Exception as error:
                first.error = error
                raise
            return first.result

        try:
            return await hook.function(watched, *args, **kwargs)
        except Exception as error:
            if error is first.error or isinstance(error, hook.deliberate):
                raise
            report()
        if first.error is not None:
            raise first.error
        return first.result if first.made else await target(*args, **kwargs)

    return guarded
