"""The hooks of this process: installs them, and checks that SGLang has wrapped their targets.

SGLang ignores an error of a plugin and starts without its hooks, so the start of a server and its
scheduler check them.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_qspec.engine.boundary.guard import guarded_hook
from sglang_qspec.engine.boundary.hook import Hook
from sglang_qspec.errors import ConfigError

_tables: dict[str, tuple[Hook, ...]] = {}
"""By the name of their table in `engine.start.hooks`: the hooks that `install` got."""


def install(table: str, rows: tuple[Hook, ...]) -> None:
    """Register the hooks of a table with SGLang, each with its guard."""
    _tables[table] = rows
    for row in rows:
        HookRegistry.register(row.target, guarded_hook(row), row.kind)


def check(table: str) -> None:
    """Raise ConfigError unless SGLang has wrapped each target of a table with its hook."""
    if table not in _tables:
        raise ConfigError(
            f"the {table} hooks of QSPEC are not installed: the plugin did not load completely, "
            "and the log above has the reason"
        )
    for row in _tables[table]:
        registered = [
            (kind, getattr(function, "__wrapped__", function))
            for kind, function, _ in HookRegistry._hooks.get(row.target, ())
        ]
        in_place = (row.kind, row.function) in registered
        if not in_place or row.target not in HookRegistry._patched:
            raise ConfigError(
                f"{row.target} is not wrapped with the hook {row.function.__name__} of QSPEC: "
                "the plugin did not load completely, and the log above has the reason"
            )
