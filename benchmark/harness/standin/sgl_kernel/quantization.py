"""Stand-in for sgl_kernel.quantization: weights in GGUF's formats, which no server here has."""

from sgl_kernel.unused import functions

__getattr__ = functions("quantization", "ggml_")
