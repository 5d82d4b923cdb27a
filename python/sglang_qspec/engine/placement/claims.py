"""What the process that reads the arguments holds for its server: GPUs, and a private address."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import stat
import tempfile

from sglang_qspec.engine.placement.devices import Gpu
from sglang_qspec.link import PrivateEndpoint

logger = logging.getLogger(__name__)


class Claims:
    """GPUs that this process has reserved for sidecars, and endpoints that it has created.

    They outlive the schedulers of the server. The kernel ends the claims with this process.
    """

    def __init__(self) -> None:
        self._locks: dict[str, int] = {}
        """File descriptor of each lock that this process holds, by the UUID of the GPU."""
        self._endpoints: list[PrivateEndpoint] = []

    def claim(self, gpu: Gpu) -> bool:
        """Reserve a GPU for the sidecar; False if another server of this user has it.

        Servers of other users, or in other containers, do not see claims; their memory on the GPU
        keeps the sidecar away.
        """
        if gpu.uuid in self._locks:
            return True
        try:
            name = os.path.join(_directory(), f"{gpu.uuid}.lock")
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            logger.info("cannot claim %s for the sidecar (%s)", gpu.uuid, error)
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._locks[gpu.uuid] = lock
        return True

    def open_endpoint(self) -> str:
        """A new private address, at which all schedulers of one server reach the same sidecar.

        Raises LinkError if no private directory can be created.
        """
        if not self._endpoints:
            atexit.register(self.release)
        self._endpoints.append(PrivateEndpoint())
        return self._endpoints[-1].address

    def release(self) -> None:
        """End the claims, and remove the endpoints."""
        while self._locks:
            os.close(self._locks.popitem()[1])
        while self._endpoints:
            self._endpoints.pop().close()


def _directory() -> str:
    """A directory that only this user can enter. Raises OSError if another user has made it."""
    path = os.path.join(tempfile.gettempdir(), f"qspec_gpus_{os.geteuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


OF_PROCESS = Claims()
"""The claims of this process."""
