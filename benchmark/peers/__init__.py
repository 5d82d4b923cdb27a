"""The servers of `bench_peers`, and how each is asked."""
