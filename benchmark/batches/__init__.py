"""Parts of `bench_batches`."""
