"""Injects faults into the processes of a running server, through a second SGLang plugin."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARMED = """
import inspect
import os
import subprocess
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace

FAULTS = Path(os.environ["QSPEC_TEST_FAULTS"])


def meet(name, moment):
    fault = FAULTS / name
    try:
        armed = fault.read_text() == moment
    except FileNotFoundError:
        return
    if armed:
        with open(FAULTS / f"{name}.met", "a") as met:
            met.write(".")
        raise KeyError("a fault")


def revive():
    # Speculation resumes with the drafts that need no sidecar, so that it can fail again.
    from sglang_qspec.engine import speculation

    if (FAULTS / "revive").exists():
        (FAULTS / "revive").unlink()
        speculation.activate(speculation.latest())


def armed(row):
    name = row.function.__name__
    if inspect.iscoroutinefunction(row.function):

        async def hook(*args, **kwargs):
            meet(name, "before")
            result = await row.function(*args, **kwargs)
            meet(name, "after")
            return result

    else:

        def hook(*args, **kwargs):
            if name == "polled":
                revive()
            meet(name, "before")
            result = row.function(*args, **kwargs)
            meet(name, "after")
            return result

    hook.__name__ = name
    return replace(row, function=hook)


def failing(sound):
    def method(*args):
        meet(sound.__name__, "before")
        return sound(*args)

    return method


def unavailable(*_):
    raise BlockingIOError(11, "Resource temporarily unavailable")


def popen(calls=count(), real=subprocess.Popen):
    def start(*args, **kwargs):
        if next(calls) < 2:
            unavailable()
        return real(*args, **kwargs)

    return start


def load():
    from sglang_qspec.engine.speculator import Speculator
    from sglang_qspec.engine.start import hooks
    from sglang_qspec.sidecar import forks

    for name in ("detokenizer", "front", "scheduler"):
        rows = getattr(hooks, name)
        setattr(hooks, name, cache(lambda rows=rows: tuple(map(armed, rows()))))
    Speculator.commit = failing(Speculator.commit)
    forks.ForkServer.of_this_process = unavailable
    forks.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen()})
"""
"""Source of the plugin. While a file with the name of a hook contains `before` or `after`, the hook
fails before or after its work, and adds a byte to NAME.met. `commit` is `Speculator.commit`, which
can only fail before. The scheduler's process cannot be forked, and the first two starts of a fork
server fail.
"""


def plugin(folder: Path, code: str) -> dict[str, str]:
    """Environment variables of a server that loads `code` as a plugin, before this package's.

    `code` can import `test`.
    """
    (folder / "faulty.py").write_text(code)
    package = folder / "faulty-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[sglang.srt.plugins]\nfaulty = faulty:load\n")
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Faults:
    """Arms the hooks of a server that has `environment`."""

    def __init__(self, folder: Path, more: str = "") -> None:
        """`folder` is an empty folder; `more` are further lines of the plugin's `load`."""
        self._folder = folder / "faults"
        self._folder.mkdir()
        self.environment = plugin(folder, ARMED + more) | {"QSPEC_TEST_FAULTS": str(self._folder)}

    def arm(self, hook: str, moment: str = "before") -> None:
        """Make the hook fail `before` or `after` its work at each call, until `disarm`."""
        whole = self._folder / f"{hook}.new"
        whole.write_text(moment)
        whole.rename(self._folder / hook)

    def disarm(self, hook: str) -> None:
        (self._folder / hook).unlink()

    def met(self, hook: str) -> int:
        """Number of times that the hook has failed."""
        met = self._folder / f"{hook}.met"
        return len(met.read_text()) if met.exists() else 0

    def revive(self) -> None:
        """Activate failed speculation again at the scheduler's next iteration."""
        (self._folder / "revive").touch()

    @property
    def reviving(self) -> bool:
        return (self._folder / "revive").exists()
