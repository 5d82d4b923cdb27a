"""Pictures that commands write; matplotlib, an extra, is imported only here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_qspec.errors import ConfigError

INSTALL = "pip install 'sglang-qspec[bench]'"
"""Command that installs matplotlib."""
SUFFIXES = (".svg", ".png")


def check_suffix(option: str, path: Path) -> None:
    """Raise ConfigError unless `path`, the value of `option`, ends like a picture."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{option} is {path}, but must end in {' or '.join(SUFFIXES)}")


@contextlib.contextmanager
def axes(option: str, path: Path, size: tuple[float, float], kind: str) -> Iterator[Any]:
    """Axes to draw on; the end of the context writes them to `path` as a picture of this kind.

    `option` is the option that names the file, `size` is in inches. Raises ConfigError if
    matplotlib is missing or the file cannot be written.
    """
    try:
        # Not pyplot, which keeps figures and looks for a display.
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"{option} is {path}, but matplotlib is missing: {INSTALL}") from None
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    found = figure.subplots()
    yield found
    found.spines[["top", "right"]].set_visible(False)
    found.legend(frameon=False)
    try:
        figure.savefig(path, format=kind)
    except OSError as error:
        raise ConfigError(f"{option} is {path}, but it cannot be written: {error}") from None
