"""Progress messages on standard error; results alone go to standard output."""

from __future__ import annotations

import sys


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
