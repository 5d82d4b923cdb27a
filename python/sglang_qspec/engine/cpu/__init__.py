"""Lets SGLang run on CPUs without SGLang's own kernels: call `activate()` in every process."""

from sglang_qspec.cpu.install import install_kernels


def activate() -> None:
    """Register the attention backend and faster layers if this machine needs the stand-ins.

    Does nothing if SGLang runs on a GPU or has its own CPU kernels. Repeated calls have no further
    effect.
    """
    if not install_kernels():
        return
    # These import modules of SGLang that fail without the stand-ins.
    from sglang_qspec.engine.cpu import (
        attention,
        defaults,
        dense_linear,
        llama,
        lora,
        quantization,
        ranks,
        shared_expert,
    )

    attention.register()
    defaults.register()
    dense_linear.install()
    llama.install()
    lora.install()
    quantization.register()
    ranks.install()
    shared_expert.install()
