"""Queue speculation and batch-parallel speculation for SGLang, as a plugin.

SGLang finds the plugin by itself. Only a program that imports SGLang's engine on a CPU for which
SGLang has no kernels must import this package first, for the stand-ins to be in place by then.
"""

from sglang_qspec.cpu.install import install_kernels

__version__ = "0.1.0"

install_kernels()
