"""The outcome of a pass on the host: tokens, statistics, labels and traces."""
