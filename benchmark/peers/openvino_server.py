"""Serves a GGUF file by OpenVINO GenAI, which has a pipeline but no server of its own.

    PYTHON benchmark/peers/openvino_server.py --model MODEL.gguf --host 127.0.0.1 --port 30000

PYTHON needs the packages openvino-genai and openvino-tokenizers, and nothing of this repository.
The file may have weights in float16, but not in bfloat16; a draft model may not be a GGUF file.
`POST /completion` takes prompts and gives answers as llama.cpp's server does, all of them by one
continuous batch. `GET /health` answers once the model is loaded.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

CANDIDATES = 4
"""Number of draft tokens a pass."""
LONGEST_MATCH = 4
"""Number of tokens at the end of a text that a lookup looks for, at most."""


class Engine:
    """Runs one pipeline in a thread of its own, which all requests share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._looks_up = options.lookup
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = options.cache_gib
        scheduler.max_num_seqs = options.slots
        names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        given: dict[str, Any] = dict.fromkeys(names, options.precision)
        if options.lookup:
            given["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(options.model), scheduler, "CPU", given
        )
        self._ids = count()
        self._changed = threading.Condition()
        """A request has come, or a step has ended."""

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        """The answer of `tokens` tokens. Raises what the pipeline raises."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = tokens, True
        if self._looks_up:
            config.num_assistant_tokens, config.max_ngram_size = CANDIDATES, LONGEST_MATCH
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        with self._changed:
            handle = self._pipeline.add_request(next(self._ids), ids, config)
            self._changed.notify_all()
            self._changed.wait_for(lambda: handle.get_status() != genai.GenerationStatus.RUNNING)
            return list(handle.read_all()[0].generated_ids)

    def run(self) -> None:
        """Serve requests without end."""
        while True:
            with self._changed:
                self._changed.wait_for(self._pipeline.has_non_finished_requests)
            self._pipeline.step()
            with self._changed:
                self._changed.notify_all()


def handler_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """The class that answers HTTP requests by `engine`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send({"tokens": engine.answer(body["prompt"], body["n_predict"])})

        def _send(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    return Handler


class Listener(ThreadingHTTPServer):
    request_queue_size = 128  # clients connect at the same time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the target as a GGUF file")
    add("--lookup", action="store_true", help="draft by lookups in the text")
    add("--precision", default="bf16", help="of products and KV cache (default: bf16)")
    add("--slots", type=int, default=16, help="requests in flight (default: 16)")
    add("--cache-gib", type=int, default=1, help="size of the KV cache (default: 1)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    options = parser.parse_args()
    engine = Engine(options)
    threading.Thread(target=engine.run, daemon=True).start()
    Listener((options.host, options.port), handler_of(engine)).serve_forever()


if __name__ == "__main__":
    main()
