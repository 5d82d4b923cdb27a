"""Parts of `bench_sidecar`: loads of many requests and servers, and a stopwatch."""
