"""The sidecar processes of a server whose sidecar the tests start."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from subprocess import DEVNULL

from sglang_qspec.link import fingerprint
from sglang_qspec.tools.models import DemoModels
from test.engine.server.running import cores
from test.preloaded.interpreter import Popen

ROOT = Path(__file__).parents[3]


class Sidecars:
    """Starts sidecars at one endpoint, one at a time."""

    def __init__(self, models: DemoModels, endpoint: str) -> None:
        self.endpoint = endpoint
        self._models = models
        self._process: Popen | None = None

    def start(self) -> None:
        """Start a sidecar that drafts."""
        self._start(
            "sglang_qspec.sidecar",
            "--model-path",
            str(self._models.draft),
            "--endpoint",
            self.endpoint,
            "--cores",
            str(cores(1)[0]),
            "--device",
            "cpu",
            "--mem-fraction",
            "0.08",
        )

    def start_lying(self, seed: int) -> None:
        """Start a sidecar that sends wrong messages."""
        from transformers import AutoTokenizer

        digest = fingerprint(AutoTokenizer.from_pretrained(self._models.target).get_vocab())
        self._start("test.engine.lying_sidecar", self.endpoint, "49152", digest, str(seed))

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "the sidecar ended by itself"
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self, module: str, *arguments: str) -> None:
        self._process = Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stdin=DEVNULL)
