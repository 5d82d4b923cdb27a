"""Stand-in for sgl_kernel.utils."""


def is_arch_support_pdl() -> bool:
    """Whether kernels may start before the kernel before them ends: never with the stand-ins."""
    return False
