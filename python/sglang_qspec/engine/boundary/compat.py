"""Checks that SGLang has the version and the names that QSPEC uses."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

import sglang

from sglang_qspec.engine.boundary import sglang_names
from sglang_qspec.engine.boundary.hook import Hook
from sglang_qspec.errors import ConfigError

SGLANG_VERSION = "0.5.23"


def check_version() -> None:
    """Raise ConfigError unless the installed SGLang has the version that QSPEC supports."""
    if sglang.__version__ != SGLANG_VERSION:
        raise ConfigError(
            f"sglang is {sglang.__version__}, but this sglang-qspec supports only {SGLANG_VERSION}"
        )


def used_names(hooks: Iterable[Hook]) -> tuple[str, ...]:
    """The targets of `hooks`, and all other names of SGLang that QSPEC uses."""
    return (*(hook.target for hook in hooks), *sglang_names.CALLED)


def missing_names(names: Iterable[str]) -> list[str]:
    """Those of the dotted `names` that the installed packages lack."""
    missing = []
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    return missing
