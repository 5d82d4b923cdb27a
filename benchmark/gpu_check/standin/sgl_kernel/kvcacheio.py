"""Stand-in for sgl_kernel.kvcacheio: transfers of SGLang's KV cache on the host, which is off."""

from sgl_kernel.unused import unused


def __getattr__(name: str) -> object:
    if name.startswith("transfer_kv_"):
        return unused(f"kvcacheio.{name}")
    raise AttributeError(f"sgl_kernel.kvcacheio.{name} has no stand-in")
