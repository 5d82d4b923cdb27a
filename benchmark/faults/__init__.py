"""The parts of `bench_faults`: an endless load, and the recovery of its throughput."""
