"""The parts of `bench_soak`: a random load for hours, what it may do, and what must hold."""
