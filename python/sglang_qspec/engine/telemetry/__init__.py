"""What speculation has cost and earned, for /server_info and /metrics."""
