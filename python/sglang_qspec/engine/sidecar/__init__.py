"""The engine's side of the sidecar: its start, and what is sent to it."""
