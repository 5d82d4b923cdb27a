"""Endpoints that an operator adds or removes while the server runs, by `/set_internal_state`.

SGLang's message has only numbers as values, so the name of the setting has the address:
`qspec_endpoint:ADDRESS` is 1 to add a sidecar and 0 to remove it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_qspec import values
from sglang_qspec.config import QSpecConfig, flag
from sglang_qspec.errors import LinkError, RequestError
from sglang_qspec.link import keys
from sglang_qspec.link.address import check_connect
from sglang_qspec.link.faults import quote

PREFIX = "qspec_endpoint:"


def check(given: Mapping[str, Any], settings: QSpecConfig) -> None:
    """Check the changes of endpoints among `given` against the `settings` of the start.

    Raises RequestError for a change that is not allowed, whatever endpoints the server has now.
    """
    for name, value in given.items():
        if not name.startswith(PREFIX):
            continue
        address, shown = name.removeprefix(PREFIX), quote(name)
        if not settings.endpoints:
            raise RequestError(
                f"{shown} cannot be set: the server has no endpoints, because it was started "
                f"without {flag('endpoint')}"
            )
        if value not in (0, 1):
            raise RequestError(
                f"{shown} is {value}, but must be 1 (add this sidecar) or 0 (remove it)"
            )
        try:
            values.endpoints(address)
            if values.parse_endpoints(address) != (address,):
                raise ValueError("one address without spaces")
            if value:  # a sidecar can be removed whatever became of its folder or the key file
                check_connect(address, keys.load_for(address, settings.key_file))
        except ValueError as error:
            raise RequestError(f"{shown} names no sidecar: it must have {error}") from None
        except LinkError as error:
            raise RequestError(f"{shown} cannot be set: {error}") from None


def changed(endpoints: Sequence[str], name: str, value: float) -> tuple[str, ...]:
    """The `endpoints` after one change, which `check` has accepted.

    Raises RequestError for too many endpoints, or if the endpoint to remove is not among them.
    """
    address = name.removeprefix(PREFIX)
    if value:
        after = tuple(dict.fromkeys((*endpoints, address)))
        if len(after) > values.MAX_ENDPOINTS:
            raise RequestError(
                f"{quote(name)} cannot be added: a server has at most {values.MAX_ENDPOINTS} "
                "endpoints"
            )
        return after
    if address not in endpoints:
        listed = ", ".join(endpoints) or "none"
        raise RequestError(f"{quote(name)} cannot be removed: the endpoints are {listed}")
    return tuple(each for each in endpoints if each != address)
