"""Queue speculation and batch-parallel speculation for SGLang, as a plugin.

SGLang loads the plugin through its entry point. A program that imports SGLang's engine on a CPU
must import this package first, because it installs the kernels that SGLang lacks there.
"""

from sglang_qspec.cpu.install import install_kernels

__version__ = "0.1.0"

install_kernels()
