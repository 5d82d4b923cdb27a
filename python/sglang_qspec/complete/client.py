"""A running QSPEC server, as a client of the standard library alone sees it."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_qspec.errors import ClientError

TIMEOUT_S = 600.0


class Client:
    """Talks to the server at `url`. All methods raise ClientError, in one sentence."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def check(self) -> None:
        """Is there a server, and is it one that speculates with QSPEC?"""
        info = self._read("/server_info")
        try:
            speculates = "qspec" in info["internal_states"][0]
        except (LookupError, TypeError):
            raise ClientError(f"{self.url} is no SGLang server") from None
        if not speculates:
            raise ClientError(
                f"the server at {self.url} does not speculate with QSPEC: it must be started with "
                "--speculative-algorithm QSPEC"
            )

    def generate(
        self, prompt: str, sampling_params: dict[str, Any], *, stream: bool = True
    ) -> Iterator[dict[str, Any]]:
        """The answer so far, again and again until it is complete."""
        body = {"text": prompt, "sampling_params": sampling_params, "stream": stream}
        with self._open("/generate", body) as response:
            for line in self._lines(response):
                data = line.removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                piece = json.loads(data)
                if "error" in piece:
                    raise ClientError(f"{self.url} says: {_message(piece)}")
                yield piece

    def decode(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """The text of each of these lists of token ids, by the server's tokenizer."""
        body = {"tokens": [list(ids) for ids in batch]}
        texts: list[str] = self._read("/detokenize", body)["text"]
        return texts

    def _read(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._open(path, body) as response:
            try:
                return json.loads("".join(self._lines(response)))
            except ValueError:
                raise ClientError(f"{self.url}{path} answers no JSON") from None

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        try:
            request = urllib.request.Request(
                self.url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise ClientError(f"{self.url} says (HTTP {error.code}): {_reason(text)}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ClientError(f"no server answers at {self.url}: {reason}") from None
        except ValueError:
            raise ClientError(f"{self.url} is no address such as http://127.0.0.1:30000") from None
        return response

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[str]:
        try:
            for line in response:
                yield line.decode()
        except (OSError, http.client.HTTPException):
            raise ClientError(f"{self.url} broke off its answer") from None


def _reason(text: str) -> str:
    """What an error's body says, whatever its form."""
    try:
        return _message(json.loads(text))
    except ValueError:
        return text.strip() or "nothing more"


def _message(body: Any) -> str:
    """The message in SGLang's, OpenAI's or FastAPI's form of an error."""
    while isinstance(body, dict):
        inner = [body[key] for key in ("error", "message", "detail") if key in body]
        if not inner:
            break
        body = inner[0]
    return str(body)
