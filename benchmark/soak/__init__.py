"""The parts of `bench_soak`.

mix (templates) ─► traffic (asking) ─► verdict (answers, references) ─► journal
disturbance, monitor (processes) ─► leaks, summary (slope) ─► chart
"""
