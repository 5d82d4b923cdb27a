"""CUDA graphs of the target's passes, on a CPU."""
