"""A Ray cluster of two nodes on this machine, each with one CPU.

    python -m test.tools.batch.cluster.nodes

It prints its address. The line `remove` on standard input takes the second node away, and the end
of the input ends the cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
from ray.cluster_utils import Cluster

from test.tools.batch.fakes import ROOT


class Nodes:
    """The cluster, in a process with an environment of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()

    def processes(self, words: str) -> list[psutil.Process]:
        """The processes below the nodes with these words in their command line."""
        found = []
        for each in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if words in " ".join(each.cmdline()):
                    found.append(each)
            except psutil.NoSuchProcess:
                continue
        return found

    def remove_one(self) -> None:
        """Kill the second node with all its processes."""
        assert self._process.stdin is not None
        self._process.stdin.write("remove\n")
        self._process.stdin.flush()


@contextmanager
def two_nodes(environment: dict[str, str]) -> Iterator[Nodes]:
    """A cluster; its actors have this environment."""
    with subprocess.Popen(
        [sys.executable, "-m", "test.tools.batch.cluster.nodes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as process:
        try:
            yield Nodes(process)
        finally:
            process.communicate(timeout=600)


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until the condition is true. The process must not end before."""
    deadline = time.monotonic() + 300
    while not condition():
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.05)


def main() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    # With an address of its own, so that a client is always connected to the first node.
    second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(second, allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
