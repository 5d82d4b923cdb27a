"""CUDA graphs of the target's passes, and what SGLang's attention backends on GPUs can verify.

No GPU has run this yet: tests run SGLang's own graph runner on a CPU, with calls in place of
graphs.
"""
