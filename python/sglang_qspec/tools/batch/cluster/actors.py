"""What runs on the nodes of the cluster: a server in an actor, and a sidecar in another."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from sglang_qspec import config
from sglang_qspec.errors import ServerLostError
from sglang_qspec.sidecar.child_process import LOOK_S, PROGRAM, Supervised
from sglang_qspec.tools.batch.cluster.cores import Cores
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.own_server import OwnServer, launch_settings
from sglang_qspec.tools.batch.server import Reply
from sglang_qspec.tools.guesses.guess import Guess
from sglang_qspec.tools.ports import free_port


@dataclass(frozen=True)
class ServerSpec:
    """The server of each actor."""

    model: str | None
    """The target; None stands for the demo models."""
    draft_model: str | None
    flags: tuple[str, ...]
    """More flags of the server."""
    timeout: float
    """Maximum wait for an answer, in seconds."""
    in_flight: int | None
    """Number of lines that the server has at once; None derives it."""
    target_gpus: int
    """GPUs of the target's ranks; 0 means a server on CPUs."""
    draft_gpus: int
    """GPUs of the server's own sidecar; 0 means that it shares those of the target."""
    cores: int
    """CPU cores of the server."""
    endpoints: tuple[str, ...] = ()
    """Endpoints of running sidecars; without any, the server starts its own."""
    key: bytes = b""
    """Contents of the key file for the endpoints."""

    @property
    def gpus(self) -> int:
        """GPUs of the server with its own sidecar."""
        return self.target_gpus + self.draft_gpus


class ServerActor:
    """Holds a server on its node. A new attempt to open it starts it again."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._folder = Path(tempfile.mkdtemp(prefix="qspec-batch-"))
        self._cores = Cores(0 if spec.target_gpus else spec.cores)
        self._server: OwnServer | None = None

    async def open(self) -> int:
        """Start the server; returns the number of lines that it should have at once.

        Raises QSpecError if it does not start.
        """
        if self._server is None:
            self._server = self._new_server()
        await self._server.open()
        return self._server.depth

    async def ask(self, line: Line, guesses: Sequence[Guess]) -> Reply:
        """Send a line and wait for its reply. Raises ServerLostError."""
        if self._server is None:
            raise ServerLostError("the server does not run")
        return await self._server.ask(line, guesses)

    async def close(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _new_server(self) -> OwnServer:
        spec = self._spec
        arguments, environment = launch_settings(
            spec.model,
            None if spec.endpoints else spec.draft_model,  # the sidecars have it
            on_cuda=spec.target_gpus > 0,
        )
        environment.pop("OMP_NUM_THREADS", None)  # Ray sets it for work of its own kind
        return OwnServer(
            [*arguments, *self._placement(), *spec.flags],
            environment,
            self._folder / "server.log",
            timeout=spec.timeout,
            in_flight=spec.in_flight,
            cpus=self._cores.numbers or None,
        )

    def _placement(self) -> list[str]:
        """The flags for GPUs and endpoints. Ray shows the actor its own GPUs, numbered from 0."""
        spec = self._spec
        flags = []
        if spec.target_gpus > 1:
            flags += ["--tp-size", str(spec.target_gpus)]
        if spec.draft_gpus:
            flags += ["--speculative-qspec-draft-device", f"cuda:{spec.target_gpus}"]
        if spec.endpoints:
            key_file = _write_key(self._folder, spec.key)
            flags += ["--speculative-qspec-endpoint", ",".join(spec.endpoints)]
            flags += ["--speculative-qspec-key-file", str(key_file)]
        return flags


class SidecarActor:
    """Runs a sidecar that the servers of all nodes share, and restarts its process when it fails.

    Ray must not restart the actor: the new one would have an address that the servers do not know.
    """

    def __init__(self, draft_model: str, key: bytes, on_cuda: bool) -> None:
        """`key` has the contents of the key file. Without a GPU the sidecar gets one CPU core."""
        address: str = ray.util.get_node_ip_address()
        self._folder = Path(tempfile.mkdtemp(prefix="qspec-sidecar-"))
        key_file = _write_key(self._folder, key)
        self._cores = Cores(0 if on_cuda else 1)
        self._endpoint = f"tcp://{address}:{free_port(address)}"
        command = [
            *PROGRAM,
            f"--model-path={draft_model}",
            f"--endpoint={self._endpoint}",
            f"--key-file={key_file}",
            f"--device={'cuda' if on_cuda else 'cpu'}",
            f"--cores={','.join(map(str, sorted(self._cores.numbers)))}",
            f"--supervisor-pid={os.getpid()}",
        ]
        self._process = Supervised(command, visible=config.visible_gpus(), forks=not on_cuda)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sidecar", daemon=True)
        self._process.start()
        self._thread.start()

    def endpoint(self) -> str:
        """Where the servers find the sidecar."""
        return self._endpoint

    def close(self) -> None:
        """End the sidecar."""
        self._stopping.set()
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self._process.keep_alive()
        self._process.stop()


def _write_key(folder: Path, key: bytes) -> Path:
    """Write a key file that no other user can read."""
    path = folder / "key"
    path.touch(mode=0o600)
    path.write_bytes(key)
    return path
