"""Stand-in for sgl_kernel.kvcacheio: transfers of SGLang's host KV cache, which the check lacks."""

from sgl_kernel.unused import functions

__getattr__ = functions("kvcacheio", "transfer_kv_")
