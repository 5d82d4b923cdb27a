"""What benchmark/bench_queue.py is made of.

dataset ─► serving (servers of configurations) ─► measures ─► figures (charts) ─► report
"""
