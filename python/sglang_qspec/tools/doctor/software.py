"""Checks of Python, of this package, of SGLang and of the settings in the environment."""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib import metadata

from sglang_qspec import config
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, failure, ok, warning

OLDEST, TESTED = (3, 11), (3, 12)
"""Oldest Python that runs the package, and the newest one that requirements/ locks."""


def python(case: Case) -> Finding:
    """Whether this Python and this system run SGLang."""
    version = sys.version_info[:2]
    machine = f"{platform.system()} {platform.machine()}"
    found = f"Python {platform.python_version()} on {machine}"
    if version < OLDEST:
        return failure(found, "Install Python 3.11 or 3.12.")
    if machine != "Linux x86_64":
        return warning(found, "QSPEC is tested on Linux x86_64 only.")
    if version > TESTED:
        return warning(found, "Use Python 3.11 or 3.12, with which QSPEC is tested.")
    return ok(found)


def package(case: Case) -> Finding:
    """Whether the compiled parts of this package are there."""
    from sglang_qspec import __version__

    advice = "Install the package with a C++ compiler (g++): `pip install .` in its folder."
    try:
        from sglang_qspec import trie
    except ImportError as error:
        return failure(f"the compiled tries cannot be loaded: {error}", advice)
    found = f"sglang-qspec {__version__} in {trie.__path__[0].rpartition('/')[0]}"
    if importlib.util.find_spec("sglang_qspec.cpu._native") is None:
        return warning(found + ", without compiled products for CPUs", advice)
    return ok(found)


def settings(case: Case) -> Finding:
    """Whether all variables SGLANG_QSPEC_* of the environment are settings with allowed values."""
    errors = [str(error) for error in config.environment_errors()]
    if errors:
        return failure("; ".join(errors), "Correct or unset these environment variables.")
    case.settings = config.from_environment()
    default = config.QSpecConfig()
    changed = [
        config.variable(field.name)
        for field in config.fields()
        if getattr(case.settings, field.name) != getattr(default, field.name)
    ]
    return ok("set: " + ", ".join(changed) if changed else "all settings have their defaults")


def sglang(case: Case) -> Finding:
    """Whether the supported release of SGLang is installed, in the build for the device."""
    try:
        from sglang_qspec.engine.boundary import compat
    except ImportError as error:
        return failure(
            f"{_installed()}: {error}",
            "Install this package again: `pip install .` in its folder installs SGLang's release.",
        )
    compat.check_version()
    import torch

    from sglang_qspec.cpu.install import install_kernels

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    found = f"sglang {compat.SGLANG_VERSION}, torch {torch.__version__} ({build} build)"
    if case.kind == "cpu":
        own = install_kernels()
        case.sglang = True
        return ok(found + (", with QSPEC's kernels" if own else ", with SGLang's kernels for CPUs"))
    importlib.import_module("sgl_kernel")
    case.sglang = True
    return ok(found + ", sgl_kernel loads")


def _installed() -> str:
    """The installed release of SGLang, for a message."""
    try:
        return f"sglang {metadata.version('sglang')} does not fit"
    except metadata.PackageNotFoundError:
        return "SGLang is not installed in this Python"


def hooks(case: Case) -> Finding:
    """Whether the plugin loads, and everything that it uses of SGLang is there."""
    case.sglang = False
    from sglang_qspec.engine.start import preflight

    names = preflight.check_plugin()
    case.sglang = True
    return ok(f"the plugin loads, and SGLang has all {names} names that it uses")
