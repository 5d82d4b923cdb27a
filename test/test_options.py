"""Every numeric option of every command, with values that are no numbers or no sensible ones."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec import __main__ as command
from sglang_qspec.sidecar import __main__ as sidecar

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


OPTIONS = dict([*options(command._parser(), "qspec"), *options(sidecar._parser(), "sidecar")])


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
