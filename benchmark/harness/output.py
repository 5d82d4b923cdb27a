"""Progress messages on standard error; results alone go to standard output."""

from __future__ import annotations

import sys

from tqdm import tqdm


def say(text: str) -> None:
    """Print a line above the progress bar, if there is one."""
    tqdm.write(text, file=sys.stderr)
