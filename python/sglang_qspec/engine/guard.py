"""A guard around each hook: an error of ours does not become an error of SGLang's.

What is SGLang's own passes through a guard as it is: an exception of the target, and the result of
a target that an AROUND hook has called before it failed. The target is never called twice for it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_qspec.engine import failsafe
from sglang_qspec.engine.hooks import Hook, OnError

logger = logging.getLogger(__name__)


def guarded_hook(hook: Hook) -> Callable[..., Any]:
    """The function to register for `hook`: its own, or one that has it as `__wrapped__`."""
    if hook.on_error is OnError.STOP_START:
        return hook.function
    report = _Report(hook)
    if hook.kind is not HookType.AROUND:
        return _beside(hook, report)
    if inspect.iscoroutinefunction(hook.function):
        return _around_async(hook, report)
    return _around(hook, report)


class _Report:
    """Says what an error in one hook has led to; in full only once, as each request may meet it."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._told = False

    def __call__(self) -> None:
        """For the exception that is being handled."""
        hook = self._hook
        what = f"the hook {hook.function.__name__} on {hook.target.rpartition('.')[2]}"
        if hook.on_error is OnError.END_SPECULATION:
            failsafe.end_speculation(what)
            return
        level = logging.DEBUG if self._told else logging.ERROR
        self._told = True
        logger.log(
            level,
            "An error in %s: %s. Later errors in this hook are logged at the level DEBUG",
            what,
            hook.on_error.value,
            exc_info=True,
        )


def _beside(hook: Hook, report: _Report) -> Callable[..., Any]:
    """A BEFORE or AFTER hook: None leaves SGLang its own arguments, or its own result."""

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
    """How the first call of a target by its AROUND hook ended; any other is the hook's own idea."""

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
    """As `_around`, for a coroutine function around one."""

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
