"""The passes of the target that `qspec models compare` measures."""

from __future__ import annotations

MOST_IN_FLIGHT = 48
"""Most requests of a pass of the largest width: a pass has `policy.PASS_ROWS` rows at most, 768."""
WIDTHS = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 2, 4, 8)}
"""Measured widths of the target's passes by device. The largest is a server's default, and on a GPU
a server captures CUDA graphs of the others."""
