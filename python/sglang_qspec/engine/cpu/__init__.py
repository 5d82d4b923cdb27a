"""SGLang on CPUs for which its own kernels are not built: `activate()` in every process."""

from sglang_qspec.cpu.install import install_kernels


def activate() -> None:
    """Register the attention backend and faster layers, if this machine needs the stand-ins.

    Does nothing if SGLang runs on a GPU or has its own CPU kernels. Repeated calls are harmless.
    """
    if not install_kernels():
        return
    from sglang_qspec.engine.cpu import attention, defaults, dense_linear, llama, quantization

    attention.register()
    defaults.register()
    dense_linear.install()
    llama.install()
    quantization.register()
