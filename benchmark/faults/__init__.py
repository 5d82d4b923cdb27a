"""The parts of `bench_faults`: a load that never ends, and how soon its throughput is back."""
