"""The files of a checkpoint, and the folder of a new one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.tools.models.files import check_new, read_config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json cannot be read: Expecting"),
        ("[]", r"config\.json must hold a JSON obj"),
    ],
)
def test_a_config_that_is_no_json_object_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_an_empty_folder_makes_room_for_the_new_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    check_new(empty)
    assert not empty.exists()


def test_a_mount_point_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: Path) -> NoReturn:
        raise OSError(16, os.strerror(16))

    monkeypatch.setattr(Path, "rmdir", busy)
    with pytest.raises(QSpecError, match="cannot be replaced .* give a new folder inside it"):
        check_new(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "keys"
    assert main(["keys", str(output)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_qspec.tools.theory.command.run", interrupted)
    assert main(["theory"]) == 130
