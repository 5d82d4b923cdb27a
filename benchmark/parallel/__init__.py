"""What benchmark/bench_batch_parallel.py is made of.

plan ─► serving (servers) ─► journal ─► measures ─► comparisons ─► targets ─► report (figures)
"""
