"""Batches that are killed, and batches with the answers of earlier runs, for `bench_resume`."""
