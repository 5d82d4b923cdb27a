"""Counts and timings of speculation for /server_info and /metrics."""
