"""The command `qspec keys`: writes a key file."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_qspec.link import keys
from sglang_qspec.tools import declare

DESCRIPTION = "Write a key file for a tcp link between a separate sidecar and its servers."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    declare.value(
        parser, "path", "file to create; copy it to sidecar and servers", Path, metavar="PATH"
    )
    parser.set_defaults(run=lambda options: keys.create(options.path))
