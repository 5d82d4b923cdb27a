"""The parts of `bench_batch_parallel`.

plan ─► harness.session ─► measures ─► comparisons ─► report (figures)
"""
