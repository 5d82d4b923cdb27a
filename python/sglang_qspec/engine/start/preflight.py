"""What `qspec doctor` asks of SGLang before a server starts.

`resolved` runs the checks of a start: SGLang resolves its arguments, and QSPEC's hooks check them.
No process starts and no weights load.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from sglang.kernels.jit.utils.compile.toolchain import cuda_home
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.environ import envs
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_qspec.engine.boundary import compat, installed
from sglang_qspec.engine.placement import claims
from sglang_qspec.engine.start import families, hooks
from sglang_qspec.errors import ConfigError

PLUGIN = "qspec"
"""Name of QSPEC's entry point in pyproject.toml."""


def check_plugin() -> int:
    """Load SGLang's plugins as a start does, and return the number of names of SGLang that fit.

    Raises ConfigError if SGLang does not find QSPEC's plugin, if a hook is not in place, or if this
    SGLang lacks a name that QSPEC uses.
    """
    if not metadata.entry_points(group=GENERAL_PLUGINS_GROUP, name=PLUGIN):
        raise ConfigError(
            "SGLang does not find the plugin, because the package sglang-qspec is not installed "
            "in this Python: run `pip install .` in its folder"
        )
    allowed = envs.SGLANG_PLUGINS.get()
    if allowed and PLUGIN not in (name.strip() for name in allowed.split(",")):
        raise ConfigError(
            f"SGLANG_PLUGINS is {allowed!r}, so SGLang does not load QSPEC: unset it, or add "
            f"{PLUGIN}"
        )
    load_plugins()
    compat.check_version()
    installed.check("front")
    used = compat.used_names((*hooks.front(), *hooks.scheduler()))
    missing = compat.missing_names(used)
    if missing:
        raise ConfigError(
            f"this SGLang lacks {', '.join(missing)}, which QSPEC uses: install sglang "
            f"{compat.SGLANG_VERSION} again"
        )
    return len(used)


def toolkit() -> str:
    """Folder in which SGLang looks for the CUDA toolkit; it may be absent."""
    home: str = cuda_home()
    return home


def check_family(given_as: str, path: str) -> None:
    """Raise ConfigError if QSPEC does not support the family of a model."""
    families.check_checkpoint(given_as, path)


def resolved(**arguments: Any) -> Any:
    """SGLang's arguments after the checks of a start: the view that the hooks get, too.

    `arguments` are fields of SGLang's ServerArgs. Afterwards `environment.read` returns the
    placement of the sidecar. Raises QSpecError for what QSPEC does not support, and SGLang's own
    exceptions.
    """
    load_plugins()
    args = ServerArgs(**arguments)
    try:
        args.resolve_once()
    finally:
        claims.OF_PROCESS.release()
    return resolving_view(args)
