"""A server that answers lines over HTTP."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_qspec.errors import AnswerError, ClientError, ServerLostError
from sglang_qspec.tools.batch.abilities import Abilities, abilities_of
from sglang_qspec.tools.batch.depth import Load, depth_of, load_of
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.reply import reply_of
from sglang_qspec.tools.batch.request import request_of
from sglang_qspec.tools.batch.server import Note, Reply, ReplyKind
from sglang_qspec.tools.batch.stream import PartsError, StreamedAnswer
from sglang_qspec.tools.complete import peers
from sglang_qspec.tools.complete.http import Failure, Http, Response, WrongAddress, reason_of
from sglang_qspec.tools.guesses.guess import Guess

logger = logging.getLogger(__name__)

EVENTS = "text/event-stream"
"""The type of a streamed answer."""
NOTE_S = 1.0
"""Minimum time between two notes of the text of an answer, in seconds."""
OPEN_S = 30.0
"""Time limit of the requests that find out whether a server works, in seconds."""
LOAD_S = 2.0
"""Time limit of a request for the load of a server, in seconds."""
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
        self._abilities = Abilities()

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
                self._abilities = abilities_of(info, yields=self._yields)
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

    async def ask(
        self, line: Line, guesses: Sequence[Guess] = (), note: Note | None = None
    ) -> Reply:
        """Send a line and wait for its reply. Raises ServerLostError.

        Without `note` the answer is not streamed. A request whose guesses the server refuses is
        sent without them.
        """
        try:
            try:
                reply, guessed = await self._send(line, guesses, note)
            except PartsError:
                logger.warning("%s streams more than texts; no more is streamed", self.name)
                self._abilities = replace(self._abilities, streams=frozenset())
                reply, guessed = await self._send(line, guesses, None)
            if guessed and reply.kind is ReplyKind.REFUSED:
                reply, _ = await self._send(line, (), note)
            return reply
        except AnswerError as error:
            return Reply(ReplyKind.FAILED, reason=f"the answer {error}")
        except TimeoutError:
            reason = f"no answer in {self._timeout:g} s"
        except Failure as error:
            reason = f"the connection broke: {reason_of(error)}"
        if not await self._is_healthy():
            raise ServerLostError(f"{self.name}: {reason}")
        return Reply(ReplyKind.FAILED, reason=reason)

    async def _send(
        self, line: Line, guesses: Sequence[Guess], note: Note | None
    ) -> tuple[Reply, bool]:
        """The reply to a line, and whether guesses were sent.

        Raises AnswerError, PartsError, Failure and TimeoutError.
        """
        request = request_of(line, guesses, self._abilities, stream=note is not None)
        async with self._http.request(line.url, request.body, within=self._timeout) as response:
            if note is not None and response.content_type == EVENTS:
                answer = StreamedAnswer(line.url, self._abilities.weight_version)
                await self._receive(response, answer, note)
                status, data = answer.response()
            else:
                status, data = response.status, await self._http.read(response)
        return reply_of(status, data, line), request.guessed

    async def _receive(self, response: Response, answer: StreamedAnswer, note: Note) -> None:
        """Read a streamed answer, and note its text a second after it has grown."""
        timer: asyncio.TimerHandle | None = None

        def tell() -> None:
            nonlocal timer
            timer = None
            note(answer.guess)

        try:
            with self._http.room() as take:
                async for data in self._http.lines(response):
                    length = answer.take(data)
                    take(length)
                    if length and timer is None:
                        timer = asyncio.get_running_loop().call_later(NOTE_S, tell)
        finally:
            if timer is not None:
                timer.cancel()
            if answer.was_cut:
                note(answer.guess)

    async def load(self) -> Load | None:
        """What the server has to do now; None if it does not say."""
        try:
            async with self._http.request("/v1/loads?include=core", within=LOAD_S) as response:
                return load_of(peers.decode(await self._http.read(response)))
        except (*Failure, AnswerError):
            return None

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
