"""Whether the present process speculates, and by which `Speculator`.

SGLang's hooks are functions of its modules, so they reach the speculator here. A failure ends the
speculation of the process, and the server goes on without it.
"""

from __future__ import annotations

from sglang_qspec.engine.speculator import Speculator

_latest: Speculator | None = None
_failed = False


def active() -> Speculator | None:
    """The speculator of this process; None before its worker exists, and after a failure.

    Ranks of the target after rank 0 never have one.
    """
    return None if _failed else _latest


def latest() -> Speculator | None:
    """The speculator of this process, also after a failure."""
    return _latest


def failed() -> bool:
    """Whether speculation has failed in this process."""
    return _failed


def activate(speculator: Speculator) -> None:
    """Let SGLang's hooks in this process reach `speculator`."""
    global _latest, _failed
    _latest, _failed = speculator, False


def deactivate() -> Speculator | None:
    """End speculation in this process. Returns the speculator that was active."""
    global _failed
    ended, _failed = active(), True
    return ended
