"""The passes of the target: what they verify, in which pipeline, and with which seeds."""
