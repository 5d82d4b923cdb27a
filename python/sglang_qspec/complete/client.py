"""An HTTP client of a QSPEC server that uses only the standard library."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_qspec.errors import ClientError

TIMEOUT_S = 600.0
"""Default maximum wait for each piece of an answer, in seconds."""
SHOWN = 100
"""Maximum number of bytes of a malformed line in an error."""


class Client:
    """Sends requests to the server at `url`; its methods raise ClientError if a request fails.

    `timeout` is the maximum wait for each piece of an answer, in seconds.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout

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
        try:
            states = [part["qspec"] for part in info["internal_states"] if "qspec" in part]
        except (LookupError, TypeError):
            raise ClientError(
                f"{self.url} is not an SGLang server; give the address of a server with --url"
            ) from None
        if not states:
            raise ClientError(
                f"the server at {self.url} does not speculate with QSPEC; start it with "
                "--speculative-algorithm QSPEC"
            )
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
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            start = data[:SHOWN].decode(errors="replace")
            raise ClientError(f"{self.url}{path} sent a line that is not a JSON object: {start!r}")
        return found

    def _read(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._open(path, body) as response:
            try:
                return json.loads(b"".join(self._lines(response)))
            except ValueError:
                raise ClientError(f"the answer of {self.url}{path} is not JSON") from None

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        try:
            request = urllib.request.Request(
                self.url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
            response: http.client.HTTPResponse = urllib.request.urlopen(
                request, timeout=self._timeout
            )
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise ClientError(
                f"{self.url} refused the request (HTTP {error.code}): {reason_of(text)}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ClientError(f"no server answers at {self.url}: {reason}") from None
        except ValueError:
            raise ClientError(
                f"the address is {self.url!r}, but must be a URL such as http://127.0.0.1:30000"
            ) from None
        return response

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException):
            raise ClientError(
                f"{self.url} closed the connection before its answer was complete"
            ) from None


def reason_of(text: str) -> str:
    """The message in the body of an HTTP error, or the body itself if it is not JSON."""
    try:
        return _message(json.loads(text))
    except ValueError:
        return text.strip() or "without a message"


def _message(body: Any) -> str:
    """The message of an error in the format of SGLang, OpenAI or FastAPI."""
    while isinstance(body, dict):
        inner = [body[key] for key in ("error", "message", "detail") if key in body]
        if not inner:
            break
        body = inner[0]
    return str(body)
