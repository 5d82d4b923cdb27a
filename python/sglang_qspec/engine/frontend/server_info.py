"""Hides the server's secrets from /server_info, which SGLang lets any client read.

With `--admin-api-key` alone a client needs no key for /server_info, which shows all settings.
"""

from __future__ import annotations

from typing import Any

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""SGLang's settings that are secrets. SGLang itself hides those of watermarks."""
HIDDEN = "<redacted>"


def hide_in_server(result: dict[str, Any], server_args: Any, scheduler_info: Any) -> None:
    """After `build_server_info`, which has the settings and the command line of the server."""
    hide(result)


def hide(settings: dict[str, Any]) -> None:
    """Replace the secrets in the settings of a QSPEC server, and in its `launch_command`."""
    if (settings.get("speculative_algorithm") or "").upper() != "QSPEC":
        return
    secrets = {name: secret for name in SECRETS if (secret := settings.get(name))}
    settings.update(dict.fromkeys(secrets, HIDDEN))
    if command := settings.get("launch_command"):
        # One secret may be a part of another.
        for secret in sorted(secrets.values(), key=len, reverse=True):
            command = command.replace(secret, HIDDEN)
        settings["launch_command"] = command
