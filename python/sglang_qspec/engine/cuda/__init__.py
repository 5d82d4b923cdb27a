"""CUDA graphs of the target's passes, and what SGLang's attention backends on GPUs can verify.

Tests run SGLang's own graph runner on a CPU, with calls in place of graphs.
"""
