"""Counts the collective operations of a target's ranks, and delays them like slow links.

A server of the benchmark loads `load` as a plugin of SGLang. The ranks read the delay from a file,
so it can change while the server runs. Rank 0 writes the counts to another one. Only operations on
the devices' group count: on GPUs the others stay in the memory of the host.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

FOLDER = "QSPEC_BENCH_LINKS"
"""Environment variable with the folder of both files."""
WRAPPED = ("all_reduce", "all_gather_into_tensor", "all_gather", "broadcast")
"""Functions of torch.distributed that SGLang calls for the devices."""
ENTRY_POINT = "[sglang.srt.plugins]\nqspec_links = benchmark.tensor_parallel.links:load\n"


class Counts(NamedTuple):
    """Since the start of a server."""

    operations: int
    """Collective operations of a rank."""
    size: int
    """Bytes of its operands."""


class Links(AbstractContextManager["Links"]):
    """The files, and the plugin's folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="qspec-links-")
        self._path = Path(self._folder.name)
        np.zeros(2, np.int64).tofile(self._path / "counts")
        self.delay_ms = 0.0
        package = self._path / "qspec_links-1.dist-info"
        package.mkdir()
        name = "Metadata-Version: 2.1\nName: qspec_links\nVersion: 1\n"
        (package / "METADATA").write_text(name)
        (package / "entry_points.txt").write_text(ENTRY_POINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a server that loads the plugin."""
        root = str(Path(__file__).parents[2])
        paths = [self._folder.name, root, os.environ.get("PYTHONPATH", "")]
        return {FOLDER: self._folder.name, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    @property
    def delay_ms(self) -> float:
        """Time that each collective operation takes longer, in milliseconds."""
        return float(np.fromfile(self._path / "delay")[0])

    @delay_ms.setter
    def delay_ms(self, value: float) -> None:
        # The same file, because the ranks have mapped it.
        mode = "r+b" if (self._path / "delay").exists() else "w+b"
        with (self._path / "delay").open(mode) as file:
            file.write(np.array([value]).tobytes())

    @property
    def counts(self) -> Counts:
        """The counts of rank 0 of all servers with this environment."""
        return Counts(*np.fromfile(self._path / "counts", np.int64).tolist())


def load() -> None:
    """SGLang calls this in each process of the server."""
    import torch.distributed

    folder = Path(os.environ[FOLDER])
    delay = np.memmap(folder / "delay", np.float64, "r")
    counts = np.memmap(folder / "counts", np.int64, "r+")
    for name in WRAPPED:
        function = getattr(torch.distributed, name)
        setattr(torch.distributed, name, slowed(function, delay, counts, _on_devices))


def slowed(
    function: Callable[..., Any],
    delay: Any,
    counts: Any,
    counted: Callable[[Any], bool],
) -> Callable[..., Any]:
    """`function` with its first operand counted and delayed, if its group is `counted`."""
    import torch.distributed

    @wraps(function)
    def called(*operands: Any, **given: Any) -> Any:
        if counted(given.get("group")):
            if torch.distributed.get_rank() == 0:
                counts[0] += 1
                counts[1] += operands[0].nbytes if hasattr(operands[0], "nbytes") else 0
            if delay[0]:
                time.sleep(delay[0] / 1e3)
        return function(*operands, **given)

    return called


def _on_devices(group: Any) -> bool:
    """Whether this is the group of the target's devices, after it exists."""
    from sglang.srt.distributed import parallel_state

    ranks: Any = parallel_state._TP
    return group is not None and ranks is not None and group is ranks.device_group
