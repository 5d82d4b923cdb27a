"""Stand-in for sgl_kernel.kvcacheio: transfers of SGLang's host KV cache, which the check lacks."""

from sgl_kernel.unused import unused


def __getattr__(name: str) -> object:
    if name.startswith("transfer_kv_"):
        return unused(f"kvcacheio.{name}")
    raise AttributeError(f"sgl_kernel.kvcacheio.{name} has no stand-in")
