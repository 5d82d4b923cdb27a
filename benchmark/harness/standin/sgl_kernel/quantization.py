"""Stand-in for sgl_kernel.quantization: weights in GGUF's formats, which no server here has."""

from sgl_kernel.unused import unused


def __getattr__(name: str) -> object:
    if name.startswith("ggml_"):
        return unused(f"quantization.{name}")
    raise AttributeError(f"sgl_kernel.quantization.{name} has no stand-in")
