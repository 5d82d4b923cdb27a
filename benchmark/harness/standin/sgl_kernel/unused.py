"""Functions that SGLang imports on CUDA, but that a dense model in bfloat16 never calls."""

from collections.abc import Callable
from typing import NoReturn


def functions(module: str, prefix: str) -> Callable[[str], object]:
    """The `__getattr__` of a submodule in which all names with the prefix are unused functions."""

    def find(name: str) -> object:
        if name.startswith(prefix):
            return unused(f"{module}.{name}")
        raise AttributeError(f"sgl_kernel.{module}.{name} has no stand-in")

    return find


def unused(name: str) -> Callable[..., NoReturn]:
    """A function that can be imported, and that names itself if it is called."""

    def call(*_arguments: object, **_named: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no stand-in: gpu-check supplies only what a dense model in "
            "bfloat16 needs with --attention-backend triton --sampling-backend pytorch"
        )

    return call
