"""A server that answers lines over HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import aiohttp

from sglang_qspec.errors import AnswerError, ClientError, ServerLostError
from sglang_qspec.tools.batch.depth import depth_of
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.reply import reply_of
from sglang_qspec.tools.batch.server import Reply, Verdict
from sglang_qspec.tools.complete import peers

HEADERS = {"Content-Type": "application/json"}
READING_BYTES = 8 * peers.MAX_BYTES
"""Maximum size of all answers of a server that are being read."""
OPEN_S = 30.0
"""Time limit of the requests that find out whether a server works, in seconds."""
KEEPALIVE_S = 3.0
"""Maximum time that a connection idles. SGLang closes one that has idled for five seconds."""
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
    ) -> None:
        """`timeout` is the maximum wait for an answer in seconds.

        `in_flight` is the number of lines that the server has at once; None derives it. `listens`
        says whether the server itself listens at `url`; None trusts the address.
        """
        self._url = url.rstrip("/")
        self.name = _PASSWORD.sub("//", self._url)
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._in_flight = in_flight
        self._listens = listens
        self._derived = 1
        self._reading = 0
        """Number of bytes of the answers that are being read."""
        self._session: aiohttp.ClientSession | None = None

    @property
    def depth(self) -> int:
        """Number of lines that the server should have at once."""
        return self._in_flight or self._derived

    async def open(self) -> None:
        """Ask the server how many lines it should have at once."""
        try:
            async with self._get("/server_info") as response:
                if response.status in (401, 403):
                    raise ClientError(f"it refuses requests with HTTP {response.status}")
                if response.status != 200:
                    reason = f"{self.name}/server_info answers with HTTP {response.status}"
                    raise ServerLostError(reason)
                self._derived = depth_of(peers.decode(await self._read(response)))
        except (aiohttp.InvalidURL, ValueError):
            raise ClientError(
                f"--url is {self.name!r}, but must be the URL of an SGLang server such as "
                "http://127.0.0.1:30000"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"no server answers at {self.name}: {_text(error)}") from None
        except ServerLostError:
            raise
        except AnswerError as error:
            raise ClientError(f"--url is {self.name!r}, but its /server_info {error}") from None
        except ClientError as error:
            raise ClientError(f"--url is {self.name!r}, but {error}") from None

    async def ask(self, line: Line) -> Reply:
        """Send a line and wait for its reply. Raises ServerLostError."""
        try:
            async with self._opened().post(
                self._url + line.url,
                data=line.body,
                headers=HEADERS,
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                return reply_of(response.status, await self._read(response), line)
        except AnswerError as error:
            return Reply(Verdict.FAILED, reason=f"the answer {error}")
        except TimeoutError:
            reason = f"no answer in {self._timeout.total:g} s"
        except (aiohttp.ClientError, OSError) as error:
            reason = f"the connection broke: {_text(error)}"
        if not await self._answers():
            raise ServerLostError(f"{self.name}: {reason}")
        return Reply(Verdict.FAILED, reason=reason)

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _answers(self) -> bool:
        """Whether the server is healthy after a request failed."""
        try:
            async with self._get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    def _get(self, path: str) -> Any:
        timeout = aiohttp.ClientTimeout(total=OPEN_S)
        return self._opened().get(self._url + path, timeout=timeout, allow_redirects=False)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The body of a response. Raises AnswerError if it is compressed or too long."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise AnswerError(f"is compressed ({peers.message(encoding)})")
        data = bytearray()
        try:
            async for piece in response.content.iter_any():
                data += piece
                self._reading += len(piece)
                peers.check_size(len(data))
                if self._reading > READING_BYTES:
                    raise AnswerError("is too long beside the other answers")
        finally:
            self._reading -= len(data)
        return bytes(data)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(self._listens),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


class _Connector(aiohttp.TCPConnector):
    """Connects only while the server itself listens."""

    def __init__(self, listens: Callable[[], bool] | None) -> None:
        # The pool hands out as many lines as the server should have.
        super().__init__(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._listens = listens

    async def connect(self, *given: Any, **named: Any) -> Any:
        """A connection to the server. Raises ClientConnectionError if another process listens."""
        self._check()
        connection = await super().connect(*given, **named)
        try:
            self._check()
        except aiohttp.ClientConnectionError:
            connection.close()
            raise
        return connection

    def _check(self) -> None:
        if self._listens is not None and not self._listens():
            raise aiohttp.ClientConnectionError("the server does not listen on its port")


def _text(error: Exception) -> str:
    number = error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    if number is not None and number > 0:  # the numbers of a resolver are below 0
        return os.strerror(number)
    return peers.message(str(error)) or type(error).__name__
