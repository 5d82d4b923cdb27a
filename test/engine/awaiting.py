"""Servers whose drafts do not depend on the speeds of target and sidecar, through a second plugin.

On another machine drafts come too late, wide passes do not pay, or the target is better off without
the sidecar. A test that needs drafts, or a request that still runs, uses a server with this plugin:

- The first passes of a request wait for all step drafts that the sidecar is about to send, and each
  pass does if the request gets drafts of the sidecar alone. A request that gets no step drafts
  waits for its first completion before it is served.
- A pass counts with the time that `PassCost` predicts, not with the measured time. Waits and the
  link cost nothing. The sidecar drafts for running requests, whatever that costs the target, and
  never rests.
- A test can hold the target, and let it run a number of passes (`held`).

The policies, the passes and the sidecar are otherwise those of any server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmark.harness.server import Server
from benchmark.harness.speculation import states_of
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting_plugin import HOLD, done_file
from test.engine.faulty import plugin
from test.engine.server.running import COMMON, QSPEC, connected, cores, state, until
from test.preloaded.server import Server as Preloaded

AWAIT = """
    from test.engine import awaiting_plugin

    awaiting_plugin.install()
"""
"""Lines for the end of a plugin's function `load`."""


def awaiting(folder: Path, more: str = "") -> dict[str, str]:
    """Environment variables of a server with this plugin; `folder` is an empty folder.

    `more` are further lines of the plugin's function `load`.
    """
    return {**plugin(folder, "def load():" + AWAIT + more), HOLD: str(folder / "hold")}


@contextmanager
def server_with_sidecar(
    models: DemoModels, folder: Path, *flags: str, more: str = ""
) -> Iterator[Preloaded]:
    """A server that awaits drafts; target and own sidecar have a core each.

    `folder` and `more` are as in `awaiting`. At the end it fails if speculation or the server has
    ended.
    """
    arguments = [
        *COMMON,
        *QSPEC,
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
        *flags,
    ]
    environment = awaiting(folder, more)
    with Preloaded(models.target, arguments, cores=cores(0), environment=environment) as running:
        connected(running)
        yield running
        assert not state(running)["failed"], running.log[-4000:]
        assert running.exit_code(1.0) is None, "the server has ended:\n" + running.log[-4000:]


class Held:
    """A target that runs passes only when the test lets it. All its ranks do, and all schedulers.

    The server takes requests, aborts and all other messages meanwhile.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._allowed = Path(server._environment[HOLD])
        schedulers = range(len(states_of(server)))
        self._done = [done_file(self._allowed, scheduler) for scheduler in schedulers]
        self._passes = 0

    def run(self, passes: int) -> None:
        """Let the target run this number of passes, prefills included, and wait for their end.

        Each scheduler must have requests.
        """
        self._passes += passes
        whole = self._allowed.with_suffix(".new")
        whole.write_text(str(self._passes))
        whole.rename(self._allowed)
        if passes:
            until(lambda: all(self._passes_of(done) == str(self._passes) for done in self._done))

    def release(self) -> None:
        """Let the target run on its own, after it has taken all messages that were sent."""
        self._server.get("/server_info")
        self._allowed.unlink(missing_ok=True)
        until(lambda: not any(done.exists() for done in self._done))

    @staticmethod
    def _passes_of(done: Path) -> str:
        return done.read_text() if done.exists() else ""


@contextmanager
def held(server: Server) -> Iterator[Held]:
    """A context in which the target is held; see `Held`."""
    target = Held(server)
    target.run(0)
    try:
        yield target
    finally:
        target.release()
