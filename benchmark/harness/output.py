"""Prints progress on standard error, and writes the files and the last line of a benchmark."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.harness.machine import provenance
from benchmark.harness.report import Figure


def say(text: str) -> None:
    """Print a line above the progress bar, if there is one."""
    tqdm.write(text, file=sys.stderr)


def print_record(record: Mapping[str, Any]) -> None:
    """Print the last line of a benchmark: JSON, with command, machine and versions."""
    print(json.dumps({**record, **provenance()}))


def write(folder: Path, record: Mapping[str, Any], figures: Iterable[Figure]) -> None:
    """Write `results.json` and the charts of `figures` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    for figure in figures:
        if figure.svg is not None:
            (folder / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
