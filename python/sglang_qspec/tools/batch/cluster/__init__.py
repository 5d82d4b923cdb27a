"""Runs the servers of a batch as actors on a Ray cluster; the only home of Ray."""
