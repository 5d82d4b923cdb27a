"""A server with the target, which writes answers and measures its own passes.

The server runs QSPEC without a draft model. The runtime settings give each pass one width, with
padding for missing drafts. So the times are those of real verify passes, host work included.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from sglang_qspec.compare.answers import Answer
from sglang_qspec.compare.place import server_environment
from sglang_qspec.complete.client import Client
from sglang_qspec.errors import ClientError, QSpecError

START_S = 1800.0
"""Time limit for the start of the server, in seconds; a large model takes minutes."""
STOP_S = 15.0
PASSES = 12
"""Number of passes of a measurement that are timed."""
REPEATS = 2
"""Measurements of each kind of pass; the fastest counts, as the least disturbed one."""
SAMPLING_SEED = 1000
"""Sampling seed of the first sampled answer; the next ones follow."""


class TargetServer:
    """`python -m sglang.launch_server` on a free port of 127.0.0.1, as a context manager."""

    def __init__(
        self,
        model: str,
        *,
        device: str,
        cpus: frozenset[int],
        slots: int,
        widest: int,
        context: int,
        flags: Sequence[str] = (),
    ) -> None:
        """`slots` requests run at once, each of at most `context` tokens, on `cpus`.

        `widest` is the largest number of tokens that a pass verifies for a request.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._client = Client(f"http://127.0.0.1:{port}")
        self._device, self._cpus = device, cpus
        self._command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        self._command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        self._command += ["--max-running-requests", str(slots)]
        self._command += ["--speculative-algorithm", "QSPEC", "--speculative-qspec-verify", "tree"]
        self._command += ["--speculative-num-draft-tokens", str(widest)]
        if device == "cpu":
            self._command += ["--device", "cpu", "--max-total-tokens", str(2 * slots * context)]
        self._command += flags
        self._log = tempfile.NamedTemporaryFile(prefix="qspec-compare-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, tick: Callable[[], object]) -> None:
        """Start, and wait until the server answers. `tick` is called about once a second.

        Raises QSpecError with the end of the log if the server does not start.
        """
        own = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, self._cpus)  # the server inherits the CPUs
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=server_environment(self._device),
            )
        finally:
            os.sched_setaffinity(0, own)
        deadline = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            tick()
            with contextlib.suppress(ClientError):
                self._client.state()
                return
            time.sleep(1.0)
        ended = self._process.poll()
        what = f"took over {START_S:g} s" if ended is None else f"ended with code {ended}"
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        raise QSpecError("\n".join((f"the start of the target's server {what}:", *lines[-20:])))

    def stop(self) -> None:
        """End the server and every process below it."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            for each in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()
        self._process = None
        self._log.close()

    def answers(
        self, prompts: Sequence[list[int]], tokens: int, temperature: float | None
    ) -> list[Answer]:
        """An answer of at most `tokens` tokens to each prompt; greedy if `temperature` is None."""
        self._set(draft_token_num=1, fixed_width=1)
        seeds = [None if temperature is None else SAMPLING_SEED + i for i in range(len(prompts))]
        params = [
            {"temperature": 0.0, "max_new_tokens": tokens}
            if seed is None
            else {"temperature": temperature, "sampling_seed": seed, "max_new_tokens": tokens}
            for seed in seeds
        ]
        body = {"input_ids": list(prompts), "sampling_params": params}
        found = self._client.post("/generate", body)
        return [
            Answer(prompt, each["output_ids"], seed)
            for prompt, each, seed in zip(prompts, found, seeds, strict=True)
        ]

    def pass_seconds(self, prompts: Sequence[list[int]], requests: int, width: int) -> float:
        """Seconds of a pass over `requests` with `width` tokens of each, host work included."""
        self._set(draft_token_num=width, fixed_width=1)
        texts = list(itertools.islice(itertools.cycle(prompts), requests))
        self._generate(texts, 2)
        measured = []
        for _ in range(REPEATS):
            before = self._counters()
            self._generate(texts, PASSES)
            passes, seconds = (
                now - then for now, then in zip(self._counters(), before, strict=True)
            )
            measured.append(seconds / max(1.0, passes))
        return min(measured)

    def _generate(self, texts: list[list[int]], tokens: int) -> None:
        params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
        self._client.post("/generate", {"input_ids": texts, "sampling_params": params})

    def _counters(self) -> tuple[float, float]:
        """Number and seconds of all decode passes so far."""
        pipelines: Any = self._client.state()["pipelines"].values()
        passes = sum(each["passes"] for each in pipelines)
        return passes, sum(each["seconds"] for each in pipelines)

    def _set(self, **settings: int) -> None:
        """Change runtime settings. Raises QSpecError if the server refuses them."""
        body = {f"qspec_{name}": value for name, value in settings.items()}
        if self._client.post("/set_internal_state", {"server_args": body}) != [True]:
            raise QSpecError(f"the target's server refused {body}")
