"""QSPEC's flags: adds them to SGLang's parser, and writes their values to the environment.

The process that starts a server calls `add_flags` when it builds the parser and `read_flags` after
parsing. Its other processes inherit the environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang_qspec import config
from sglang_qspec.engine.boundary import refusal
from sglang_qspec.errors import ConfigError


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: add a flag for each setting of QSPEC."""
    group = parser.add_argument_group("QSPEC speculative decoding (sglang-qspec)")
    for field in config.fields():
        name, default = field.name, field.default
        if isinstance(default, bool):
            group.add_argument(
                config.flag(name),
                action="store_const",
                const=str(not default).lower(),
                help=field.metadata["help"],
            )
            continue
        shown = f" (default: {default})" if default != "" else ""
        group.add_argument(
            config.flag(name),
            type=_argument_type(name),
            metavar=type(default).__name__.upper(),
            help=field.metadata["help"] + shown,
        )


def _argument_type(name: str) -> Callable[[str], str]:
    def checked(text: str) -> str:
        try:
            config.parse(name, text, given_as=config.flag(name))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return checked


def read_flags(from_cli_args: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`: write the flags to the environment, for all processes."""
    refusal.note_command_line()
    given = {
        field.name: text
        for field in config.fields()
        if (text := getattr(args, "speculative_qspec_" + field.name, None)) is not None
    }
    algorithm = getattr(args, "speculative_algorithm", None) or ""
    if given and algorithm.upper() != "QSPEC":
        refusal.refuse(
            ConfigError(
                f"{config.flag(next(iter(given)))} is given, but --speculative-algorithm is "
                f"{algorithm or 'not set'}: it must be QSPEC"
            )
        )
    config.to_environment(given)
    return from_cli_args(cls, args)
