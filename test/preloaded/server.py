"""A server for tests that test neither its start nor its end."""

import contextlib

import psutil

from benchmark.harness import server
from test.preloaded.interpreter import Popen


class Server(server.Server):
    """A server whose processes fork from one that has imported SGLang."""

    popen = Popen

    def stop(self) -> None:
        """Kill all processes: SGLang looks only every five seconds whether it shall end."""
        processes = self.processes
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(processes[1:], timeout=self.stop_seconds)
        super().stop()
