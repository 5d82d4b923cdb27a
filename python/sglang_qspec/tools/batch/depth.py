"""How many lines a server should have at once, and how they yield to other requests."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_qspec.errors import ClientError

WAITING = 64
"""Waiting lines for each scheduler with a sidecar, which drafts for them. The sidecar decodes 64
completions at once by default, 8 for each line, so it drafts for 8 waiting lines at a time."""
WAITING_PLAIN = 16
"""Waiting lines for each scheduler without a sidecar. They only keep the batch full."""
YIELD = 1000
"""Distance between the priorities of lines and of other requests. It is above SGLang's default
`--priority-scheduling-preemption-threshold`, so SGLang also interrupts running lines for them."""
MAX_DEPTH = 4096
"""Maximum number of lines that a server has at once, whatever it claims to run."""
_REQUESTS = ("num_running_reqs", "num_waiting_reqs")


def depth_of(info: Any) -> int:
    """The running requests of all schedulers, and the lines that should wait at them.

    `info` is the decoded answer of /server_info. A limit of the server on its queue is a limit here
    too. Raises ClientError if the answer is not that of SGLang.
    """
    try:
        depth = sum(_of_scheduler(info, state) for state in info["internal_states"])
        if depth < 1:
            raise ValueError
    except (LookupError, TypeError, AttributeError, ValueError):
        raise ClientError("its /server_info is not that of an SGLang server") from None
    return min(depth, MAX_DEPTH)


class Load(NamedTuple):
    """What all schedulers of a server have to do."""

    requests: int
    """Requests that run or wait."""
    slots: int
    """Requests that can run at once."""


def load_of(loads: Any) -> Load | None:
    """The load in the decoded answer of /v1/loads; None if the answer is another one."""
    try:
        ranks = loads["loads"]
        requests = sum(_count(each[name]) for each in ranks for name in _REQUESTS)
        slots = sum(_count(each["max_running_requests"]) for each in ranks)
    except (LookupError, TypeError, ValueError):
        return None
    return Load(requests, slots) if slots else None


def priority_of(info: Any) -> int | None:
    """The priority of lines that yield to the requests of others; None if the server has none.

    `info` is as for `depth_of`. Without --default-priority-value SGLang serves requests without a
    priority last, so that no line can come after them.
    """
    usual = info.get("default_priority_value")
    if not info.get("enable_priority_scheduling") or type(usual) is not int:
        return None
    return usual + (YIELD if info.get("schedule_low_priority_values_first") else -YIELD)


def _of_scheduler(info: dict[str, Any], state: dict[str, Any]) -> int:
    running = state.get("effective_max_running_requests_per_dp") or info["max_running_requests"]
    drafts = state.get("qspec", {}).get("sidecar", "none") != "none"
    waiting = WAITING if drafts else WAITING_PLAIN
    limit = info.get("max_queued_requests")
    return _count(running) + (waiting if limit is None else min(waiting, _count(limit)))


def _count(value: Any) -> int:
    """A number of requests. Raises ValueError for anything else."""
    if not isinstance(value, int) or value < 0:
        raise ValueError
    return value
