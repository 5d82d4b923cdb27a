"""Declares the options of the commands, one call for each option."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang_qspec import values

SERVER = "http://127.0.0.1:30000"
"""Address of the server that a command asks by default."""


def value(
    parser: argparse._ActionsContainer,
    name: str,
    help: str,
    parse: values.Parser | None = None,
    metavar: str | None = None,
    *,
    default: object = None,
    **more: Any,
) -> None:
    """Declare an option, or an argument, that has a value; None as `parse` takes any text.

    Its help ends with the default, unless there is none or the help names it. `more` is for
    `add_argument`.
    """
    if default not in (None, "", []) and "(default:" not in help:
        help += " (default: %(default)s)"
    if parse is not None:
        more["type"] = parse if parse is Path else values.option(parse)
    parser.add_argument(name, metavar=metavar, default=default, help=help, **more)


def switch(parser: argparse._ActionsContainer, name: str, help: str) -> None:
    """Declare an option that is on if it is given."""
    parser.add_argument(name, action="store_true", help=help)


def server(parser: argparse._ActionsContainer) -> None:
    """Declare the address of the server that the command asks."""
    value(parser, "--url", "address of the server", metavar="URL", default=SERVER)
