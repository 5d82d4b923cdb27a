"""The commands with strange numbers, closed standard streams and files of many brackets."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec import __main__ as qspec
from sglang_qspec.sidecar.options import parser as sidecar_parser
from test.strange_server import DEEP
from test.tools.batch.fake_server import FakeServer
from test.tools.batch.fakes import assert_complete, records_of, serving, write_lines

ROOT = Path(__file__).parents[1]
STRANGE = ("", " ", "nan", "inf", "-inf", "1e400", "0x10", "-1", "\x1b[2J", "9" * 400, "9" * 5000)


def options(parser: argparse.ArgumentParser, prefix: str) -> Iterator[tuple[str, Any]]:
    """The options of a parser that parse their values, and those of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from options(each, f"{prefix} {name}")
        elif action.type not in (None, Path):
            yield f"{prefix} {action.option_strings[0]}", action.type


OPTIONS = dict(
    [
        *options(qspec._parser(qspec.COMMANDS), "qspec"),
        *options(sidecar_parser(), "sidecar"),
    ]
)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_strange_value_is_refused_in_one_short_line_or_is_a_sensible_one(name: str) -> None:
    for text in STRANGE:
        try:
            value = OPTIONS[name](text)
        except argparse.ArgumentTypeError as error:
            message = str(error)
            assert len(message) < 300
            assert message.isprintable()
        else:
            assert not isinstance(value, float) or math.isfinite(value)
            assert not isinstance(value, int) or value <= 2**31


def test_the_options_of_all_commands_are_checked() -> None:
    assert {"qspec batch --timeout", "qspec top --interval", "sidecar --parent-pid"} <= set(OPTIONS)
    assert len(OPTIONS) > 50


def run(closed: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `qspec` with some standard streams closed, in the words of a shell."""
    command = [sys.executable, "-m", "sglang_qspec", *arguments]
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "-", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


CLOSED = ("<&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-")


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_standard_streams_change_neither_the_status_nor_the_files(
    tmp_path: Path, closed: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["a", "status-400"])
    output = tmp_path / "out.jsonl"
    with serving(FakeServer()) as url:
        given = ["batch", str(path), "--output", str(output), "--url", url]
        done = run(closed, given)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert_complete(output, ["a"])
    assert len(records_of(tmp_path / "out.errors.jsonl")) == 1


def test_a_closed_standard_input_cannot_be_read(tmp_path: Path) -> None:
    given = ["batch", "-", "--output", str(tmp_path / "out"), "--url"]
    with serving(FakeServer()) as url:
        done = run("<&-", [*given, url])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "qspec: the input - cannot be read: Bad file descriptor\n"


def test_brackets_inside_each_other_in_a_file_are_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_bytes(DEEP)
    for given in (["theory", "--fit", str(path)], ["show", "--prompts", str(path)]):
        assert qspec.main(given) == 1
        said = capsys.readouterr().err
        assert said.startswith("qspec: ")
        assert said.count("\n") == 1
