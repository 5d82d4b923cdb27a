"""Keeps SGLang's overlap scheduler on for a QSPEC server on a CPU, through a second plugin.

On a CPU nothing runs in parallel, but the order of events is the same as on a GPU: SGLang launches
a pass before it processes the result of the previous pass.
"""

from pathlib import Path

from test.engine.faulty import plugin

OVERLAP = """
    from sglang_qspec.engine import arguments

    arguments.OVERLAPS.add("cpu")
"""
"""Lines for the end of a plugin's function `load`."""


def overlapping(folder: Path) -> dict[str, str]:
    """Environment variables of a server whose scheduler overlaps; `folder` is an empty folder."""
    return plugin(folder, "def load():" + OVERLAP)
