"""Tells a tenant's server that a batch has ended, with a signature.

The messages and headers are those of https://www.standardwebhooks.com, which OpenAI uses too, so
`client.webhooks.unwrap` of OpenAI's client checks and reads them.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from sglang_qspec.errors import ConfigError, shown
from sglang_qspec.tools.serve_batches.store import Message

logger = logging.getLogger(__name__)

PREFIX = "whsec_"
"""How a secret begins; the rest is in base64."""
FEWEST_BYTES = 24
"""Minimum length of a secret."""
WITHIN_S = 15.0
"""Maximum time of one attempt, in seconds."""
PAUSES_S = (1.0, 5.0, 30.0, 120.0, 600.0, 1800.0)
"""Pauses between the attempts, in seconds."""


class Webhook:
    """Where the messages of a tenant go, and the secret that signs them."""

    def __init__(self, url: str, secret: str) -> None:
        """Raises ConfigError if the URL or the secret cannot be used."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(f"webhook is {shown(url)}, but must be https://HOST/PATH")
        try:
            self._key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
        except ValueError:
            self._key = b""
        if not secret.startswith(PREFIX) or len(self._key) < FEWEST_BYTES:
            raise ConfigError(
                f"webhook_secret must be {PREFIX!r} and at least {FEWEST_BYTES} bytes in base64"
            )
        self.url, self.host = url, parts.hostname

    def headers(self, id: str, body: bytes, now: int) -> dict[str, str]:
        """The headers that identify and sign a message."""
        signed = b".".join((id.encode(), str(now).encode(), body))
        digest = hmac.new(self._key, signed, hashlib.sha256).digest()
        return {
            "Content-Type": "application/json",
            "webhook-id": id,
            "webhook-timestamp": str(now),
            "webhook-signature": "v1," + base64.b64encode(digest).decode(),
        }


class Webhooks:
    """Sends messages, and repeats those that fail."""

    def __init__(self, *, private: bool = False) -> None:
        """Only `private` allows addresses that are not public."""
        self._private = private

    async def send(
        self, webhook: Webhook, message: Message, failed: Callable[[str], Awaitable[None]]
    ) -> None:
        """Send a message until it is taken, or until its attempts end with a line of the log.

        `failed` gets its id after each attempt that failed.
        """
        for pause in (*PAUSES_S[message.tried :], None):
            reason = await self._attempt(webhook, message.id, message.body)
            if reason is None:
                return
            if pause is None:
                what = f"{webhook.url} did not take the end of {message.batch}"
                logger.warning("the webhook %s: %s", what, reason)
                return
            await failed(message.id)
            await asyncio.sleep(pause)

    async def _attempt(self, webhook: Webhook, id: str, body: bytes) -> str | None:
        """Send a message once; returns why it failed, or None."""
        headers = webhook.headers(id, body, int(time.time()))
        try:
            if not self._private and _is_private_literal(webhook.host):
                return f"{webhook.host} is not a public address"
            connector = aiohttp.TCPConnector(resolver=_Resolver(private=self._private))
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=aiohttp.ClientTimeout(total=WITHIN_S),
                    cookie_jar=aiohttp.DummyCookieJar(),
                ) as session,
                session.post(
                    webhook.url, data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                return None if response.status < 300 else f"HTTP {response.status}"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return str(error) or type(error).__name__


class _Resolver(AbstractResolver):
    """Resolves names to addresses that may be used; the connection goes to one of these."""

    def __init__(self, *, private: bool) -> None:
        self._inner = ThreadedResolver()
        self._private = private

    async def resolve(
        self, host: str, port: int = 0, family: Any = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        allowed = [each for each in found if self._private or _is_public(each["host"])]
        if not allowed:
            raise OSError(errno.EHOSTUNREACH, "no public address")
        return allowed

    async def close(self) -> None:
        await self._inner.close()


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_global and not found.is_multicast


def _is_private_literal(host: str) -> bool:
    """Whether a host is an address, which needs no resolver, and not public."""
    try:
        return not _is_public(host)
    except ValueError:
        return False
