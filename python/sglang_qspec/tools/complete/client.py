"""A client of a QSPEC server, for commands that ask one thing after another."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

from sglang_qspec.errors import AnswerError, ClientError, shown
from sglang_qspec.tools.complete import peers
from sglang_qspec.tools.complete.http import Failure, Http, Response, WrongAddress, reason_of

TIMEOUT_S = 600.0
"""Default maximum wait for each piece of an answer, in seconds."""
SHOWN = 100
"""Maximum number of bytes of a malformed line in an error."""


class Client:
    """Sends requests to the server at `url`; its methods raise ClientError if a request fails.

    Each request has a connection and an event loop of its own, so threads may share a client.
    """

    def __init__(
        self, url: str, timeout: float = TIMEOUT_S, *, listens: Callable[[], bool] | None = None
    ) -> None:
        """`timeout` is the maximum wait for each piece of an answer, in seconds.

        `listens` says whether the server itself listens at `url`; None trusts the address.
        """
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._listens = listens

    def state(self) -> dict[str, Any]:
        """QSPEC's part of /server_info, for the first scheduler of the server.

        Raises ClientError unless a server at `url` answers and uses QSPEC.
        """
        return self.info()[1][0]

    def info(self) -> tuple[str, list[dict[str, Any]]]:
        """The name of the target model, and QSPEC's part of /server_info for each scheduler.

        docs/observability.md describes the part. The schedulers are in the order of `dp_rank`.
        """
        info = self._read("/server_info")
        parts = info.get("internal_states") if isinstance(info, dict) else None
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise ClientError(
                f"{self.url} is not an SGLang server; give the address of a server with --url"
            )
        states = [part["qspec"] for part in parts if isinstance(part.get("qspec"), dict)]
        if not states:
            raise ClientError(
                f"the server at {self.url} does not speculate with QSPEC; start it with "
                "--speculative-algorithm QSPEC"
            )
        with peers.reading(self.url):
            states.sort(key=lambda state: state.get("dp_rank", 0))
        return str(info.get("served_model_name") or info.get("model_path") or ""), states

    def generate(
        self, prompt: str | Sequence[int], sampling_params: dict[str, Any]
    ) -> Generator[dict[str, Any]]:
        """Yield the server's JSON for the answer so far, once for each piece that it streams.

        `prompt` is a text or token ids. Whoever may stop early closes the generator, which ends the
        request.
        """
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        body = {**given, "sampling_params": sampling_params, "stream": True}
        pieces = self._pieces("/generate", body)
        with asyncio.Runner() as runner:
            try:
                while (piece := runner.run(_next(pieces))) is not None:
                    yield piece
            finally:
                runner.run(pieces.aclose())

    def chat_ids(self, message: str) -> list[int]:
        """The token ids of a chat with one message of a user, in the model's chat template."""
        chat = {"messages": [{"role": "user", "content": message}]}
        answer = self._read("/tokenize", chat)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not (isinstance(ids, list) and all(isinstance(token, int) for token in ids)):
            raise ClientError(f"{self.url}/tokenize did not send the token ids of a chat")
        return ids

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer to a JSON request, decoded."""
        return self._read(path, body)

    def decode(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Decode each list of token ids with the server's tokenizer."""
        answer = self._read("/detokenize", {"tokens": [list(ids) for ids in batch]})
        texts = answer.get("text") if isinstance(answer, dict) else None
        if not (
            isinstance(texts, list)
            and len(texts) == len(batch)
            and all(isinstance(text, str) for text in texts)
        ):
            raise ClientError(f"{self.url}/detokenize did not send the text of {len(batch)} lists")
        return texts

    def _read(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return peers.decode(asyncio.run(self._body(path, body)))
        except AnswerError as error:
            raise AnswerError(f"the answer of {self.url}{path} {error}") from None

    async def _body(self, path: str, body: dict[str, Any] | None) -> bytes:
        async with self._opened(path, body) as (http, response):
            return await http.read(response)

    async def _pieces(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The JSON objects of a streamed answer."""
        async with self._opened(path, body) as (http, response):
            async for line in http.lines(response):
                data = line.removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                piece = self._object(data, path)
                if "error" in piece:
                    raise ClientError(f"{self.url} sent an error: {peers.message_in(piece)}")
                yield piece

    def _object(self, data: bytes, path: str) -> dict[str, Any]:
        """Parse one line of a stream."""
        with contextlib.suppress(AnswerError):
            found = peers.decode(data)
            if isinstance(found, dict):
                return found
        start = data[:SHOWN].decode(errors="replace")
        raise AnswerError(f"{self.url}{path} sent a line that is not a JSON object: {start!r}")

    @contextlib.asynccontextmanager
    async def _opened(
        self, path: str, body: dict[str, Any] | None
    ) -> AsyncGenerator[tuple[Http, Response]]:
        """The response of the server, if its status is 2xx."""
        self._check_address()
        content = None if body is None else json.dumps(body).encode()
        async with contextlib.aclosing(Http(self.url, self._listens)) as http:
            try:
                response = await http.request(path, content, piece=self._timeout)
            except WrongAddress:
                raise self._wrong_address() from None
            except Failure as error:
                raise ClientError(f"no server answers at {self.url}: {reason_of(error)}") from None
            try:
                async with response:
                    if not 200 <= response.status < 300:
                        await self._refuse(http, response)
                    yield http, response
            except Failure:
                raise ClientError(
                    f"{self.url} closed the connection before its answer was complete"
                ) from None

    async def _refuse(self, http: Http, response: Response) -> NoReturn:
        reason = "redirects are not followed"
        if not 300 <= response.status < 400:
            reason = peers.message_of(await http.read(response))
        raise ClientError(f"{self.url} refused the request (HTTP {response.status}): {reason}")

    def _check_address(self) -> None:
        """Raise ClientError for an address without a host, with a user, or of another kind."""
        try:
            parts = urlsplit(self.url)
            is_right = bool(parts.hostname) and parts.username is None
            is_right &= parts.scheme in ("http", "https")
        except ValueError:
            is_right = False
        if not is_right:
            raise self._wrong_address()

    def _wrong_address(self) -> ClientError:
        return ClientError(
            f"the address is {shown(self.url)}, but must be a URL such as http://127.0.0.1:30000"
        )


async def _next(pieces: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    """The next piece; None at the end."""
    return await anext(pieces, None)
