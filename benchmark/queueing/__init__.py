"""The parts of `bench_queue`.

load (configurations) ─► harness.session ─► summary ─► report (charts)
"""
