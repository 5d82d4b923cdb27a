"""The parts of `bench_soak`: a random load for hours, its disturbances, and its checks."""
