"""Parts of `bench_fleet`: a sidecar that serves for a time, its tenants, and the summary."""
