"""An HTTP client of a QSPEC server that uses only the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

from sglang_qspec.errors import AnswerError, ClientError, shown
from sglang_qspec.tools.complete import peers

TIMEOUT_S = 600.0
"""Default maximum wait for each piece of an answer, in seconds."""
SHOWN = 100
"""Maximum number of bytes of a malformed line in an error."""
READ_BYTES = 1 << 16
HEADERS = {"Content-Type": "application/json"}


class Client:
    """Sends requests to the server at `url`; its methods raise ClientError if a request fails.

    It connects to no other address: it follows no redirects and uses no proxies.
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

    def check(self) -> None:
        """Raise ClientError unless a server at `url` answers and uses QSPEC."""
        self.state()

    def state(self) -> dict[str, Any]:
        """QSPEC's part of /server_info, for the first scheduler of the server."""
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
        self,
        prompt: str | Sequence[int],
        sampling_params: dict[str, Any],
        *,
        stream: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """Yield the server's JSON for the answer so far, once for each piece that it streams.

        `prompt` is a text or token ids.
        """
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        body = {**given, "sampling_params": sampling_params, "stream": stream}
        with self._open("/generate", body) as response:
            for line in self._lines(response):
                data = line.removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                piece = self._object(data, "/generate")
                if "error" in piece:
                    raise ClientError(f"{self.url} sent an error: {_message(piece)}")
                yield piece

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

    def _object(self, data: bytes, path: str) -> dict[str, Any]:
        """Parse one line of a stream."""
        with contextlib.suppress(AnswerError):
            found = peers.decode(data)
            if isinstance(found, dict):
                return found
        start = data[:SHOWN].decode(errors="replace")
        raise AnswerError(f"{self.url}{path} sent a line that is not a JSON object: {start!r}")

    def _read(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._open(path, body) as response:
            data = self._body(response)
        try:
            return peers.decode(data)
        except AnswerError as error:
            raise AnswerError(f"the answer of {self.url}{path} {error}") from None

    @contextlib.contextmanager
    def _open(self, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """The response of the server, if its status is 200."""
        connection, place = self._connection()
        with contextlib.closing(connection):
            try:
                self._check_listener()
                connection.connect()
                self._check_listener()
                content = None if body is None else json.dumps(body).encode()
                method = "GET" if body is None else "POST"
                connection.request(method, place + path, content, HEADERS)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                reason = peers.message(str(error)) or type(error).__name__
                raise ClientError(f"no server answers at {self.url}: {reason}") from None
            except ValueError:
                raise self._wrong_address() from None
            with response:
                if not 200 <= response.status < 300:
                    self._refuse(response)
                yield response

    def _refuse(self, response: http.client.HTTPResponse) -> NoReturn:
        reason = "redirects are not followed"
        if not 300 <= response.status < 400:
            reason = reason_of(self._body(response))
        raise ClientError(f"{self.url} refused the request (HTTP {response.status}): {reason}")

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        """A connection that is not made yet, and the path before those of the endpoints."""
        kinds: dict[str, type[http.client.HTTPConnection]] = {
            "http": http.client.HTTPConnection,
            "https": http.client.HTTPSConnection,
        }
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in kinds or not parts.hostname or parts.username is not None:
                raise ValueError
            kind = kinds[parts.scheme]
            port = parts.port or kind.default_port
            return kind(parts.hostname, port, timeout=self._timeout), parts.path
        except (ValueError, http.client.InvalidURL):
            raise self._wrong_address() from None

    def _check_listener(self) -> None:
        """Raise OSError if another process may listen in place of the server."""
        if self._listens is not None and not self._listens():
            raise ConnectionRefusedError("it does not listen on its port")

    def _wrong_address(self) -> ClientError:
        return ClientError(
            f"the address is {shown(self.url)}, but must be a URL such as http://127.0.0.1:30000"
        )

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        """The whole body of a response."""
        data = bytearray()
        with self._complete():
            while piece := response.read(READ_BYTES):
                data += piece
                self._check_size(len(data))
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
        return bytes(data)

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The lines of a streamed body."""
        with self._complete():
            while line := response.readline(peers.MAX_BYTES + 1):
                self._check_size(len(line))
                yield line

    def _check_size(self, count: int) -> None:
        try:
            peers.check_size(count)
        except AnswerError as error:
            raise AnswerError(f"the answer of {self.url} {error}") from None

    @contextlib.contextmanager
    def _complete(self) -> Iterator[None]:
        """Raise ClientError if the connection breaks."""
        try:
            yield
        except (OSError, ValueError, http.client.HTTPException):
            raise ClientError(
                f"{self.url} closed the connection before its answer was complete"
            ) from None


def reason_of(data: bytes) -> str:
    """The message in the body of an HTTP error, or the body itself if it is not JSON; one line."""
    try:
        found = peers.decode(data)
    except AnswerError:
        found = data[:READ_BYTES].decode(errors="replace")
    return _message(found) or "without a message"


def _message(body: Any) -> str:
    """The message of an error in the format of SGLang, OpenAI or FastAPI."""
    while isinstance(body, dict):
        inner = [body[key] for key in ("error", "message", "detail") if key in body]
        if not inner:
            break
        body = inner[0]
    return peers.message(str(body))
