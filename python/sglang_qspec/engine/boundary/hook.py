"""One function of SGLang that QSPEC wraps, with the hook and its error handling.

SGLang calls a BEFORE hook with the target's arguments. An AFTER hook gets the target's result and
then the arguments. An AROUND hook gets the target itself and then the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

BEFORE, AFTER, AROUND = HookType.BEFORE, HookType.AFTER, HookType.AROUND


class OnError(Enum):
    """Consequence of an exception in a hook."""

    STOP_START = "the server does not start"
    """For hooks at the start that a correct server needs."""
    SKIP = "SGLang continues as if this call had no hook"
    """For hooks that handle one request or one answer, and for metrics."""
    END_SPECULATION = "speculation ends, and SGLang continues as if this call had no hook"
    """For hooks that report the scheduler's events to the `Speculator`."""


@dataclass(frozen=True)
class Hook:
    """One row of the tables in `engine.start.hooks`."""

    target: str
    """Dotted name of the function of SGLang."""
    function: Callable[..., Any]
    kind: HookType
    on_error: OnError
    deliberate: tuple[type[Exception], ...] = ()
    """Exceptions that refuse a request. The guard lets them pass, and SGLang answers HTTP 400."""
