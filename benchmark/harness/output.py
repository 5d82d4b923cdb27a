"""Progress on standard error, and the results of benchmarks without a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from benchmark.harness.machine import provenance


def say(text: str) -> None:
    """Print a line above the progress bar, if there is one."""
    tqdm.write(text, file=sys.stderr)


def print_record(record: Mapping[str, Any]) -> None:
    """The last line of a benchmark: JSON, with command, machine and versions."""
    print(json.dumps({**record, **provenance()}))
