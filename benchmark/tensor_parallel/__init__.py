"""The parts of `bench_tensor_parallel`."""
