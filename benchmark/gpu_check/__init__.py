"""The first hour on a GPU in one command: `scripts/gpu-check` checks and measures QSPEC there.

__main__ (options) ─► check (a process for each part, time limits) ─► page (Markdown) and JSON
parts: environment, kernels (draws, trees), pytests, parity, passes, pass_times, loads
standin: torch instead of sgl_kernel, where its wheel does not load
bundle: the files that a machine without a network needs

No GPU has run this yet. `--emulate` runs on a CPU all that needs no GPU.
"""
