"""Pictures that commands write: their axes, and what is said if they cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.picture import axes


def draw(path: Path) -> None:
    with axes("--plot", path, (2.0, 2.0), "png") as found:
        found.plot([0, 1], [1, 2], label="line")


def test_a_picture_is_written_with_the_end_of_the_context(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError) as caught:
        draw(Path("x.png"))
    install = "pip install 'sglang-qspec[bench]'"
    assert str(caught.value) == f"--plot is x.png, but matplotlib is missing: {install}"


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"--plot is .*no/x.png, but it cannot be written: "):
        draw(tmp_path / "no" / "x.png")
