"""The common parts of the benchmarks.

options ─► configuration (flags) ─► fleet ─► server
dataset ─► session (cells) ─► serving (speculation, others) ─► run ─► journal
run ─► statistics (ratios, spreads) ─► report (tables, charts)

Benchmarks without a server use only child (a model in a process), output and statistics.
"""
