"""Stand-in for sgl_kernel.utils."""


def is_arch_support_pdl() -> bool:
    """Whether a kernel may start before the previous kernel ends; the stand-ins never allow it."""
    return False
