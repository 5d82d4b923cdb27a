"""The plugin of `bench_tensor_parallel`, which counts and delays what ranks exchange."""
