"""A real sidecar process on one core, and a server's connection to it."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from sglang_qspec.config import QSpecConfig
from sglang_qspec.link import LinkState, PrivateEndpoint, SidecarLink, fingerprint
from sglang_qspec.messages import PROTOCOL, Declined, Drafted, Hello
from sglang_qspec.sidecar.child_process import SidecarProcess

START_S = 240.0
"""Time limit in seconds; loading the model is slow on a busy machine."""
CORE = max(os.sched_getaffinity(0))
"""The sidecar's core; servers of other tests use the first one."""
IDS = 49152
"""Number of token ids of the demo tokenizer, which needs no padding."""


def hello_of(target: Path, vocab_size: int = IDS) -> Hello:
    """The greeting of a server of this target."""
    vocabulary = transformers.AutoTokenizer.from_pretrained(target).get_vocab()
    return Hello(PROTOCOL, vocab_size, fingerprint(vocabulary))


@contextmanager
def running(
    settings: QSpecConfig, model_path: str, *arguments: str, **options: Any
) -> Iterator[tuple[SidecarProcess, PrivateEndpoint]]:
    """A started sidecar with further command line `arguments`, and its address."""
    with PrivateEndpoint() as endpoint:
        process = SidecarProcess(
            settings,
            model_path=model_path,
            quantization=None,
            endpoint=endpoint.address,
            device="cpu",
            cores=str(CORE),
            **options,
        )
        process.command += arguments
        process.start()
        try:
            yield process, endpoint
        finally:
            process.stop()


class Connection:
    """A link to a running sidecar, and what came over it."""

    def __init__(self, process: SidecarProcess, endpoint: PrivateEndpoint, hello: Hello) -> None:
        self.process = process
        self.endpoint = endpoint
        self.link = SidecarLink(endpoint.address, hello)
        self.told: dict[tuple[int, int], list[int]] = defaultdict(list)
        """Tokens of each completion, by submission and number."""
        self.finished: set[tuple[int, int]] = set()
        self.declined: dict[int, str] = {}

    def __enter__(self) -> Connection:
        """Wait until the link is connected or refused."""
        self.until(lambda: self.link.state is not LinkState.CONNECTING, START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def until(self, happened: Callable[[], bool], seconds: float = 300.0) -> None:
        """Receive until it has happened."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"nothing came: {self.link.refusal}"
            assert self.process.alive, f"the sidecar ended with {self.process.exit_code}"
            for message in self.link.receive():
                if isinstance(message, Drafted):
                    name = (message.submission, message.completion)
                    self.told[name] += message.token_ids
                    if message.finished:
                        self.finished.add(name)
                elif isinstance(message, Declined):
                    self.declined[message.submission] = message.reason
            time.sleep(0.005)
