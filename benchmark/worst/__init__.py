"""The parts of `bench_worst_case`: what cannot be drafted well, and how it is served."""
