"""HTTP requests of the tools to a server that they do not trust.

The requests go to the address of the server and to no other: there are no redirects, no proxies and
no cookies. The size of an answer is bounded (`peers`), and a compressed answer is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp

from sglang_qspec.errors import AnswerError
from sglang_qspec.tools.complete import peers

HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
KEEPALIVE_S = 3.0
"""Maximum time that a connection idles. SGLang closes one that has idled for five seconds."""
READING_BYTES = 8 * peers.MAX_BYTES
"""Maximum size of all answers of a server that are being read."""

Response = aiohttp.ClientResponse
Failure = (aiohttp.ClientError, OSError)
"""What a request raises if the server does not answer, or breaks the connection."""
WrongAddress = (aiohttp.InvalidURL, ValueError)
"""What a request raises if the address is no URL; to catch before `Failure`."""


class Http:
    """The connections to the server at `url`, all of them of one event loop."""

    def __init__(self, url: str, listens: Callable[[], bool] | None = None) -> None:
        """`listens` says whether the server itself listens at `url`; None trusts the address."""
        self._url = url
        self._listens = listens
        self._reading = 0
        """Number of bytes of the answers that are being read."""
        self._session: aiohttp.ClientSession | None = None

    def request(
        self,
        path: str,
        body: bytes | None = None,
        *,
        within: float | None = None,
        piece: float | None = None,
    ) -> Any:
        """A POST of JSON, or a GET without a body, as a context manager of the response.

        `within` is the time limit of the whole request, and `piece` that of the connection and of
        each piece of the answer, in seconds. Raises Failure and WrongAddress.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(self._listens),
                headers=HEADERS,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=within, sock_connect=piece, sock_read=piece)
        return self._session.request(
            method, self._url + path, data=body, timeout=timeout, allow_redirects=False
        )

    async def read(self, response: Response) -> bytes:
        """The body of a response. Raises Failure, and AnswerError if it is too long."""
        data = bytearray()
        with self.room() as take:
            async for piece in _pieces(response):
                data += piece
                take(len(piece))
        return bytes(data)

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """A function that counts what an answer takes of the memory, in bytes or characters.

        It raises AnswerError if the answer, or all answers that are being read, are too long.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            taken += count
            self._reading += count
            peers.check_size(taken)
            if self._reading > READING_BYTES:
                raise AnswerError("is too long beside the other answers")

        try:
            yield take
        finally:
            self._reading -= taken

    async def lines(self, response: Response) -> AsyncIterator[bytes]:
        """The lines of a streamed body, as they come.

        Raises Failure, and AnswerError if a line is too long.
        """
        rest = bytearray()
        async for piece in _pieces(response):
            *lines, last = piece.split(b"\n")
            for line in lines:
                yield bytes(rest + line)
                rest.clear()
            rest += last
            peers.check_size(len(rest))
        yield bytes(rest)

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def _pieces(response: Response) -> AsyncIterator[bytes]:
    """The body of a response. Raises AnswerError if it is compressed."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise AnswerError(f"is compressed ({peers.message(encoding)})")
    try:
        async for piece in response.content.iter_any():
            yield piece
    except Failure:
        # aiohttp reports that the connection broke before it gives what came until then.
        if rest := response.content._read_nowait(-1):
            yield rest
        raise


class _Connector(aiohttp.TCPConnector):
    """Connects only while the server itself listens."""

    def __init__(self, listens: Callable[[], bool] | None) -> None:
        # The caller bounds the number of its requests.
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


def reason_of(error: Exception) -> str:
    """Why a request failed, in one line."""
    number = error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    if number is not None and number > 0:  # the numbers of a resolver are below 0
        return os.strerror(number)
    return peers.message(str(error)) or type(error).__name__
