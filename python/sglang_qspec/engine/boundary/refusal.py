"""Stops the start of a server with an error that its user can read.

The functions run in the process that reads SGLang's arguments.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from sglang_qspec.errors import QSpecError

_on_command_line = False


def note_command_line() -> None:
    """Note that the arguments come from a command line, not from a caller of `sgl.Engine`."""
    global _on_command_line
    _on_command_line = True


def refuse(error: QSpecError) -> NoReturn:
    """Raise the error for a caller of `sgl.Engine`; on a command line print only its message."""
    if _on_command_line:
        sys.stderr.write(f"sglang-qspec: error: {error}\n")
        raise SystemExit(2)
    raise error
