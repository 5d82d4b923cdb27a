"""The parts of `bench_peers`."""
