"""The parts of `bench_overhead`: a probe inside the scheduler, and what its records amount to."""
