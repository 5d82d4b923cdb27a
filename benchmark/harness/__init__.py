"""The common parts of the benchmarks.

options ─► configuration (flags) ─► fleet ─► server
dataset ─► session (cells) ─► serving (speculation, others) ─► run ─► journal
standin: torch in place of SGLang's kernels, in float32 and beside another torch release
run ─► summary (rows, ratios) ─► report (tables, charts)

A cell is a configuration that serves a load in a round; the dimensions of loads have names. A
benchmark says which cells there are, how one is served, and what its last line compares.
"""
