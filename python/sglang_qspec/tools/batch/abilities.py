"""What a server can do for a batch besides answering: stream, and verify guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_qspec.guess_tags import GuessLimits
from sglang_qspec.tools.batch.depth import priority_of
from sglang_qspec.tools.batch.line import CHAT, PLAIN
from sglang_qspec.tools.guesses.guess import limits_in

_PARSERS = ("reasoning_parser", "tool_call_parser")
"""Settings of servers that divide the texts of chats into parts, which depend on streaming."""


@dataclass(frozen=True)
class Abilities:
    """What /server_info says of a server."""

    streams: frozenset[str] = frozenset()
    """Endpoints with the same texts with and without streaming."""
    guesses: GuessLimits | None = None
    """Limits on the guesses of a request; None if the server does not verify guesses."""
    weight_version: str | None = None
    """The name of the target's weights, which streams do not have and other answers do."""
    model: str | None = None
    """The name of the target, which requests to RESPONSES must have."""
    priority: int | None = None
    """The priority of lines that yield to the requests of others; None sends none."""


def abilities_of(info: Any, *, yields: bool = False) -> Abilities:
    """The abilities of a server with this decoded /server_info, which `depth_of` has checked.

    With `yields` lines come after the requests of others, if the server has priorities.
    """
    version = info.get("weight_version")
    divides = any(info.get(name) for name in _PARSERS)
    model = info.get("served_model_name") or info.get("model_path")
    return Abilities(
        frozenset({PLAIN} if divides else {PLAIN, CHAT}),
        limits_in(info["internal_states"][0].get("qspec")),
        version if isinstance(version, str) else None,
        model if isinstance(model, str) else None,
        priority_of(info) if yields else None,
    )
