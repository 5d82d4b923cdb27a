"""The default attention backend of a CPU server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_qspec.engine.cpu.attention import NAME

_registered = False


def register() -> None:
    """Make `qspec_cpu` the default instead of torch_native; repeated calls change nothing."""
    global _registered
    if not _registered:
        _registered = True
        register_resolution_hook("handle_cpu_backends")(_choose)


def _choose(server_args: Any, previous: Callable[[Any], None]) -> None:
    view = resolving_view(server_args)
    unset = view.device == "cpu" and view.attention_backend is None
    previous(server_args)
    if unset:
        declare_resolution(server_args, "sglang_qspec.engine.cpu", attention_backend=NAME)
