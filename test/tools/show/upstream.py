"""A made-up SGLang server with QSPEC that streams given answers, and can fail in several ways."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

QSPEC = {"guess_limits": {"guesses": 2, "tokens": 100}}
"""The server's part of /server_info."""
Token = tuple[str, str]
"""Text and source."""


@dataclass(frozen=True)
class Pass:
    """A pass that emitted `tokens`, and verified some `wrong` drafts (text, source, chance) too."""

    tokens: Sequence[Token]
    wrong: Sequence[tuple[str, str, float]] = ()
    match: str | None = None

    def trace(self, start: int) -> dict[str, Any]:
        """The pass as the server reports it, with its first output token at `start`."""
        right = [token for token in self.tokens if token[1] != "target"]
        nodes = [(*token, 0.8, True) for token in right] + [(*node, False) for node in self.wrong]
        chain = list(range(-1, len(right) - 1))
        # The first wrong draft is beside the first right one, each other one behind the last.
        others = [-1 if n == 0 else len(right) + n - 1 for n in range(len(self.wrong))]
        texts, sources, chances, accepted = (
            [list(column) for column in zip(*nodes, strict=True)] if nodes else ([], [], [], [])
        )
        return {
            "start": start,
            "tokens": len(self.tokens),
            "rows": len(nodes) + 1,
            "batch_requests": 2,
            "batch_rows": len(nodes) + 5,
            "ms": 20.0 + len(nodes),
            "pipeline": "queue",
            "match": None if self.match is None else {"length": 2, "text": self.match},
            "tree": {
                "ids": list(range(len(nodes))),
                "texts": texts,
                "parents": chain + others,
                "sources": sources,
                "chances": chances,
                "accepted": accepted,
            },
        }


@dataclass
class Script:
    """One answer: the prompt's token, then passes."""

    first: str
    passes: Sequence[Pass]
    dies: bool = False
    """Whether the server closes the connection behind the last pass, before the end."""
    refusal: tuple[int, str] | None = None
    """Status and message of an HTTP error, which is then the whole answer. With status 200 the
    answer lacks all fields but the text."""
    pause_s: float = 0.0
    """Time before each piece, in seconds."""
    goes_on: threading.Event | None = None
    """Set when the server may send what follows the first pass; None if it does not wait."""
    incremental: bool = False
    """Whether a piece has only its new tokens."""
    speculates: bool = True
    """Whether the server still speculates; otherwise an answer has no labels and no trace."""

    @property
    def tokens(self) -> list[Token]:
        return [(self.first, "target"), *(token for one in self.passes for token in one.tokens)]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.tokens)

    def pieces(self, vocabulary: list[str], *, traced: bool) -> Iterator[dict[str, Any]]:
        """The pieces of the stream, the prompt's token first; adds the tokens to `vocabulary`."""
        known: list[Token] = []
        base = len(vocabulary)
        traces: list[dict[str, Any]] = []
        for number in range(len(self.passes) + 1):
            begin = len(known)
            one = self.passes[number - 1] if number else Pass([(self.first, "target")])
            if number:
                traces.append(one.trace(begin))
            known += one.tokens
            vocabulary += [text for text, _ in one.tokens]
            since = begin if self.incremental else 0
            shown = known[since:]
            meta: dict[str, Any] = {"completion_tokens": len(known), "finish_reason": None}
            if traced and self.speculates:
                meta["qspec_provenance"] = [source for _, source in shown]
            if number == len(self.passes):
                if traced and self.speculates:
                    meta["qspec_trace"] = {"version": 1, "passes": traces, "omitted_passes": 0}
                meta["finish_reason"] = {"type": "stop"}
                meta["qspec"] = {
                    "passes": number,
                    "accept_length": (len(known) - 1) / max(number, 1),
                }
            ids = list(range(base + since, base + len(known)))
            yield {"text": "".join(t for t, _ in shown), "output_ids": ids, "meta_info": meta}


@dataclass
class Upstream:
    """The server; `scripts` are its answers in turn, and the last one again and again."""

    scripts: list[Script]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests to /generate."""
    left: list[int] = field(default_factory=list)
    """Number of pieces that were sent when a client left, for each such client."""
    vocabulary: list[str] = field(default_factory=list)

    def script(self) -> Script:
        return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]


@contextmanager
def upstream(*scripts: Script) -> Iterator[Upstream]:
    """A running server."""
    made = Upstream(list(scripts))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._json({"model_path": "/models/<tiny>", "internal_states": [{"qspec": QSPEC}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/detokenize":
                texts = ["".join(made.vocabulary[i] for i in ids) for ids in body["tokens"]]
                self._json({"text": texts})
            elif self.path == "/tokenize":
                self._json({"tokens": list(body["messages"][0]["content"].encode())})
            else:
                made.asked.append(body)
                self._generate(made.script(), body)

        def _generate(self, script: Script, body: dict[str, Any]) -> None:
            if script.refusal is not None:
                status, message = script.refusal
                found = {"error": {"message": message}} if status >= 400 else {"text": message}
                self._json(found, status)
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            traced = "qspec_return_trace" in body["sampling_params"]["custom_params"]
            sent = 0
            try:
                for piece in script.pieces(made.vocabulary, traced=traced):
                    time.sleep(script.pause_s)
                    if sent == 2 and script.goes_on is not None:
                        script.goes_on.wait(60)
                    if script.dies and piece["meta_info"]["finish_reason"]:
                        self.close_connection = True
                        return
                    self._chunk(b"data: " + json.dumps(piece).encode() + b"\n\n")
                    sent += 1
                self._chunk(b"data: [DONE]\n\n")
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionError:
                made.left.append(sent)
                self.close_connection = True

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def _json(self, found: Any, status: int = 200) -> None:
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield made
        server.shutdown()
