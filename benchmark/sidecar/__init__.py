"""Parts of `benchmark.bench_sidecar` that load the drafter with many requests and servers."""
