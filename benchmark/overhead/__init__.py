"""The parts of `bench_overhead`: a probe in the scheduler, and the figures from its records."""
