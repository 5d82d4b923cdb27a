"""The parts of `bench_worst_case`: loads that cannot be drafted well, and how they are served."""
