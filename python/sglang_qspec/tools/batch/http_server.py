"""A server that answers lines over HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from sglang_qspec.errors import AnswerError, ClientError, ServerLostError
from sglang_qspec.tools.batch.depth import depth_of, priority_of
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.reply import reply_of
from sglang_qspec.tools.batch.server import Reply, ReplyKind
from sglang_qspec.tools.complete import peers
from sglang_qspec.tools.complete.http import Failure, Http, WrongAddress, reason_of

OPEN_S = 30.0
"""Time limit of the requests that find out whether a server works, in seconds."""
_PASSWORD = re.compile(r"//[^/]*@")
"""User and password in a URL. The name of a server is in messages and records."""


class HttpServer:
    """The server at `url`."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        in_flight: int | None = None,
        listens: Callable[[], bool] | None = None,
        yields: bool = False,
    ) -> None:
        """`timeout` is the maximum wait for an answer in seconds.

        `in_flight` is the number of lines that the server has at once; None derives it. `listens`
        says whether the server itself listens at `url`; None trusts the address. With `yields`
        lines come after the requests of others, if the server has priorities.
        """
        url = url.rstrip("/")
        self.name = _PASSWORD.sub("//", url)
        self._http = Http(url, listens)
        self._timeout = timeout
        self._in_flight = in_flight
        self._derived = 1
        self._yields = yields
        self._priority: int | None = None

    @property
    def depth(self) -> int:
        """Number of lines that the server should have at once."""
        return self._in_flight or self._derived

    async def open(self) -> None:
        """Ask the server how many lines it should have at once."""
        try:
            async with self._http.request("/server_info", within=OPEN_S) as response:
                if response.status in (401, 403):
                    raise ClientError(f"it refuses requests with HTTP {response.status}")
                if response.status != 200:
                    reason = f"{self.name}/server_info answers with HTTP {response.status}"
                    raise ServerLostError(reason)
                info = peers.decode(await self._http.read(response))
                self._derived = depth_of(info)
                self._priority = priority_of(info) if self._yields else None
        except WrongAddress:
            raise ClientError(
                f"--url is {self.name!r}, but must be the URL of an SGLang server such as "
                "http://127.0.0.1:30000"
            ) from None
        except Failure as error:
            raise ServerLostError(f"no server answers at {self.name}: {reason_of(error)}") from None
        except ServerLostError:
            raise
        except AnswerError as error:
            raise ClientError(f"--url is {self.name!r}, but its /server_info {error}") from None
        except ClientError as error:
            raise ClientError(f"--url is {self.name!r}, but {error}") from None

    async def ask(self, line: Line) -> Reply:
        """Send a line and wait for its reply. Raises ServerLostError."""
        body = line.body
        if self._priority is not None:
            body = msgspec.json.encode(msgspec.json.decode(body) | {"priority": self._priority})
        try:
            async with self._http.request(line.url, body, within=self._timeout) as response:
                return reply_of(response.status, await self._http.read(response), line)
        except AnswerError as error:
            return Reply(ReplyKind.FAILED, reason=f"the answer {error}")
        except TimeoutError:
            reason = f"no answer in {self._timeout:g} s"
        except Failure as error:
            reason = f"the connection broke: {reason_of(error)}"
        if not await self._is_healthy():
            raise ServerLostError(f"{self.name}: {reason}")
        return Reply(ReplyKind.FAILED, reason=reason)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _is_healthy(self) -> bool:
        """Whether the server answers after a request failed."""
        try:
            async with self._http.request("/health", within=OPEN_S) as response:
                return bool(response.status == 200)
        except Failure:
            return False
