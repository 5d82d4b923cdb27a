"""The parts of `scripts/gpu-check`, which checks and measures QSPEC on a GPU in one command.

__main__ (options) ─► check (a process for each part, time limits) ─► page (Markdown) and JSON
parts: environment, pytests (kernels, mocked, distribution), passes, times, loads
bundle: the files that a machine without a network needs

`--emulate` runs the parts that need no GPU, on a CPU. docs/results.md says what one GPU has run.
"""
