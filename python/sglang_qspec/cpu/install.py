"""Makes SGLang import a stand-in for `sgl_kernel` on machines without a CPU build of it.

SGLang's scheduler processes import `sgl_kernel` before they load plugins. But a spawned process
starts with its parent's `sys.path`, so only the parent must call `install_kernels()`. A process
that imports SGLang's engine before plugins are loaded (`import sglang; sglang.Engine(...)`) must
import `sglang_qspec` first, which calls it. So this module imports nothing that loads slowly.
"""

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path

_STANDIN = Path(__file__).parent / "standin"
_logger = logging.getLogger(__name__)


def install_kernels() -> bool:
    """Make `import sgl_kernel` import the stand-in if it is needed. Returns whether it is needed.

    The stand-in is needed if SGLang runs on the CPU (`SGLANG_USE_CPU_ENGINE=1`) and no CPU build of
    sgl_kernel loads. Repeated calls have no further effect.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return False
    if str(_STANDIN) in sys.path:
        return True
    if _cpu_build_loads():
        return False
    for name in [n for n in sys.modules if n.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]
    sys.path.insert(0, str(_STANDIN))
    # Let SGLang copy KV with its own torch code; the stand-in's copy uses raw addresses.
    os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")
    _logger.info("sgl_kernel has no CPU build here: using the torch stand-in of sglang_qspec")
    return True


def _cpu_build_loads() -> bool:
    """Whether an sgl_kernel with CPU kernels is installed and loads.

    A CPU build has its compiled library at the top of the package, a CUDA build in a folder for
    each architecture. This check comes first, because an import of the package also imports torch.
    """
    spec = importlib.util.find_spec("sgl_kernel")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders or not any(any(Path(folder).glob("common_ops*.so")) for folder in folders):
        return False
    try:
        real = importlib.import_module("sgl_kernel")
    except (ImportError, OSError):
        return False
    return hasattr(real, "assign_req_to_token_pool_cpu")
