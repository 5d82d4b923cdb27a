"""Measures the pass times of both models and their agreement, and predicts the throughput."""
