"""Who may use the service: keys, and limits for each tenant."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_qspec.errors import ConfigError, shown
from sglang_qspec.tools.serve_batches.objects import ApiError
from sglang_qspec.tools.serve_batches.webhooks import Webhook

DIGEST_LENGTH = 64
"""Length of a SHA-256 digest in hexadecimal digits."""


@dataclass(frozen=True)
class Tenant:
    """A user of the service, and its limits."""

    name: str = ""
    files: int = 10_000
    """Maximum number of files."""
    bytes: int = 100 << 30
    """Maximum size of all files."""
    file_bytes: int = 200 << 20
    """Maximum size of an uploaded file."""
    lines: int = 50_000
    """Maximum number of lines of a batch."""
    batches: int = 100
    """Maximum number of batches that are not done."""
    webhook: Webhook | None = None
    """Whom to tell that a batch has ended."""


LIMITS = ("files", "bytes", "file_bytes", "lines", "batches")
HOOK = ("webhook", "webhook_secret")
EVERYONE = Tenant()
"""The tenant of a service without keys."""


class Tenants:
    """Finds the tenant of a request by its key."""

    def __init__(self, by_digest: Mapping[str, Tenant] | None = None) -> None:
        """`by_digest` has the SHA-256 digests of keys; None lets everyone in without a key."""
        self._by_digest = by_digest

    @property
    def have_keys(self) -> bool:
        """Whether requests need a key."""
        return self._by_digest is not None

    def named(self, name: str) -> Tenant:
        """The tenant with this name; one that is no longer in the file has the usual limits."""
        known = {tenant.name: tenant for tenant in (self._by_digest or {}).values()}
        return known.get(name, EVERYONE)

    def of(self, authorization: str | None) -> Tenant:
        """The tenant of a header `Authorization: Bearer KEY`. Raises ApiError."""
        if self._by_digest is None:
            return EVERYONE
        scheme, _, key = (authorization or "").partition(" ")
        found = self._by_digest.get(digest(key)) if scheme.lower() == "bearer" else None
        if found is None:
            message = (
                "the key is not known" if key else "a key is needed: Authorization: Bearer KEY"
            )
            raise ApiError(401, message, code="invalid_api_key")
        return found


def digest(key: str) -> str:
    """The SHA-256 digest of a key, which has enough random bits to need no slow hash."""
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()


def read(path: Path) -> Tenants:
    """The tenants of a TOML file. Raises ConfigError.

    It has a table for each tenant, with `keys`, a list of SHA-256 digests, some of LIMITS, and both
    of HOOK or none:

        [research]
        keys = ["5e88…"]
        batches = 5
        webhook = "https://research.example/batches"
        webhook_secret = "whsec_…"
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--keys is {path}, but cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--keys is {path}, but is no TOML: {error}") from None
    by_digest: dict[str, Tenant] = {}
    for name, table in tables.items():
        tenant = _tenant(path, name, table)
        for each in table["keys"]:
            if each.lower() in by_digest:
                raise ConfigError(f"{path}: tenant {name!r} has a key of another tenant, or twice")
            by_digest[each.lower()] = tenant
    if not by_digest:
        raise ConfigError(f"{path} has no tenant")
    return Tenants(by_digest)


def _tenant(path: Path, name: str, table: Any) -> Tenant:
    where = f"{path}: tenant {name!r}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {shown(table)}, but must be a table")
    keys = table.get("keys")
    if not isinstance(keys, list) or not keys or not all(_is_digest(each) for each in keys):
        raise ConfigError(
            f"{where}: keys is {shown(keys)}, but must be a list of SHA-256 digests of "
            f"{DIGEST_LENGTH} hexadecimal digits"
        )
    limits = {key: value for key, value in table.items() if key not in ("keys", *HOOK)}
    for key, value in limits.items():
        if key not in LIMITS:
            known = ", ".join(("keys", *LIMITS, *HOOK))
            raise ConfigError(f"{where}: {key} is unknown; there are {known}")
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}: {key} is {shown(value)}, but must be a positive number")
    return Tenant(name, **limits, webhook=_webhook(where, table))


def _webhook(where: str, table: Mapping[str, Any]) -> Webhook | None:
    given = [table.get(name) for name in HOOK]
    if given == [None, None]:
        return None
    url, secret = given
    if not isinstance(url, str) or not isinstance(secret, str):
        raise ConfigError(f"{where}: {HOOK[0]} and {HOOK[1]} must both be texts")
    try:
        return Webhook(url, secret)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _is_digest(value: object) -> bool:
    return (
        isinstance(value, str)
        and len(value) == DIGEST_LENGTH
        and set(value.lower()) <= set("0123456789abcdef")
    )
