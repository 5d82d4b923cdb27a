"""A fork server and its sidecars; the sidecar is a stand-in that imports nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from sglang_qspec.sidecar.child_process import BACKOFF_S, LOOK_S, UNUSABLE, SidecarProcess
from sglang_qspec.sidecar.child_process import PROGRAM as NAME
from sglang_qspec.sidecar.fork_server import TITLE
from sglang_qspec.sidecar.forks import ForkServer
from test.sidecar.supervision import Clock, sidecar_on, until


def run(arguments: Sequence[str]) -> int:
    """The sidecar, which leaves a file of its process id, and ends with the code that it finds."""
    code, pids = map(Path, arguments)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    assert sys.stdin.read() == ""
    (pids / str(os.getpid())).touch()
    while not code.exists():
        time.sleep(0.01)
    return int(code.read_text())


PROGRAM = (
    sys.executable,
    "-c",
    "from sglang_qspec.sidecar import fork_server\n"
    "from test.sidecar.test_forks import run\n"
    "with fork_server.standard_input() as orders:\n"
    "    fork_server.serve(orders, run)\n",
)
"""A fork server of stand-ins."""


class Stand:
    """A folder in which each sidecar leaves a file of its process id, and reads its exit code."""

    def __init__(self, folder: Path) -> None:
        self.code = folder / "code"
        self._pids = folder / "pids"
        self._pids.mkdir()
        self.arguments = [str(self.code), str(self._pids)]

    @property
    def pids(self) -> set[int]:
        """Process ids of the sidecars that have begun."""
        return {int(name) for name in os.listdir(self._pids)}

    def end(self, code: int) -> None:
        """Let the sidecars end with this code."""
        partial = self.code.with_suffix(".new")
        partial.write_text(str(code))
        partial.rename(self.code)


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


@pytest.fixture
def server(stand: Stand) -> Iterator[ForkServer]:
    made = ForkServer.as_program(os.environ, PROGRAM)
    assert made.fork(stand.arguments)
    until(lambda: made.pid in stand.pids)
    yield made
    made.close()


def test_a_sidecar_is_forked_again_after_its_end(server: ForkServer, stand: Stand) -> None:
    parent = psutil.Process(server.pid).parent()
    assert parent is not None
    assert parent.cmdline()[0] == TITLE
    pids, words = [server.pid], [*NAME, *stand.arguments]
    for _ in range(3):
        assert " ".join(psutil.Process(server.pid).cmdline()).strip() == " ".join(words)
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(60) == server.poll() == -signal.SIGKILL
        assert server.fork(stand.arguments)
        assert server.poll() is None
        until(lambda: server.pid in stand.pids - {*pids})
        assert psutil.Process(server.pid).parent() == parent
        pids.append(server.pid)
    server.terminate()
    assert server.wait(60) == 7
    assert not any(map(psutil.pid_exists, pids))
    server.close()
    assert not parent.is_running()
    assert not server.fork(stand.arguments)


def test_the_exit_code_is_what_the_sidecar_returns(server: ForkServer, stand: Stand) -> None:
    assert server.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.05)
    stand.end(UNUSABLE)
    assert server.wait(60) == UNUSABLE


def test_a_sidecar_ends_with_its_fork_server(server: ForkServer, stand: Stand) -> None:
    sidecar = psutil.Process(server.pid)
    server.kill()
    assert server.wait(60) == -signal.SIGKILL
    until(lambda: not sidecar.is_running() or sidecar.status() == psutil.STATUS_ZOMBIE)
    assert not server.fork(stand.arguments)


def test_a_fork_server_that_has_not_forked_yet_can_be_ended() -> None:
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = ForkServer.as_program(os.environ, program)
    server.fork(["x"])
    assert server.poll() is None
    server.terminate()
    assert server.wait(60) == -signal.SIGTERM
    server.close()


def test_a_sidecar_ends_when_the_server_closes_its_end(server: ForkServer) -> None:
    sidecar = psutil.Process(server.pid)
    server.close()  # SIGTERM reaches the sidecar, which has time to end
    until(lambda: not sidecar.is_running())


def test_all_processes_end_after_the_death_of_the_server(stand: Stand) -> None:
    # A child that has inherited the server's end of the socket keeps it open.
    program = (
        "import os, sys, time\n"
        "from sglang_qspec.sidecar.forks import ForkServer\n"
        "from test.sidecar.test_forks import PROGRAM\n"
        "server = ForkServer.as_program(os.environ, PROGRAM)\n"
        "server.fork(sys.argv[1:])\n"
        "if os.fork():\n"
        "    print(flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *stand.arguments], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    until(lambda: stand.pids)
    (pid,) = stand.pids
    sidecar = psutil.Process(pid)
    others = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    try:
        until(lambda: not sidecar.is_running())
    finally:
        for each in others:
            each.kill()


def test_a_process_can_be_its_own_fork_server(stand: Stand) -> None:
    program = (
        "import os, sys\n"
        "from sglang_qspec.sidecar.fork_server import serve\n"
        "from sglang_qspec.sidecar.forks import ForkServer\n"
        "from test.sidecar.test_forks import run\n"
        "server = ForkServer.of_this_process(lambda orders: serve(orders, run))\n"
        "for number in (1, 2):\n"
        "    assert server.fork(sys.argv[1:])\n"
        "    assert server.wait(60) == 5\n"
        "    assert server.pid != os.getpid()\n"
        "server.close()\n"
        "assert not server.fork(sys.argv[1:])\n"
        "print('done')\n"
    )
    stand.end(5)
    done = subprocess.run(
        [sys.executable, "-c", program, *stand.arguments], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert len(stand.pids) == 2


@pytest.mark.parametrize(
    ("ending", "code"),
    [("1 / 0", 1), ("raise SystemExit(2)", 2), ("raise KeyboardInterrupt", 1), ("pass", 6)],
)
def test_a_fork_never_goes_on_in_what_it_was_before(ending: str, code: int) -> None:
    program = (
        "import os\n"
        "from sglang_qspec.sidecar.forks import exit_with\n"
        "def run():\n"
        f"    {ending}\n"
        "    return 6\n"
        "try:\n"
        "    exit_with(run)\n"
        "finally:\n"
        "    os._exit(99)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    assert ("Traceback" in done.stderr) is (code == 1)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new fork servers be those of stand-ins."""
    sound = ForkServer.as_program

    def as_program(environment: Mapping[str, str], program: Sequence[str] = PROGRAM) -> ForkServer:
        return sound(environment, program)

    monkeypatch.setattr(ForkServer, "as_program", as_program)


def supervised(stand: Stand, clock: Clock) -> SidecarProcess:
    process = sidecar_on("cpu", clock)
    process.command[len(NAME) :] = stand.arguments
    process.start()
    until(lambda: process.pid in stand.pids)
    return process


def await_another(process: SidecarProcess, stand: Stand, pid: int) -> None:
    """Wait until a sidecar has begun that is not the process `pid`."""
    until(lambda: process.pid in stand.pids - {pid})


def test_a_restart_forks_and_a_dead_fork_server_is_started_again(stand: Stand) -> None:
    clock = Clock()
    process = supervised(stand, clock)
    assert process.pid is not None
    first = psutil.Process(process.pid).ppid()
    servers = []
    for victim in ("sidecar", "fork server"):
        (parent, sidecar) = (psutil.Process(process.pid).ppid(), process.pid)
        os.kill(sidecar if victim == "sidecar" else parent, signal.SIGKILL)
        until(lambda: not process.alive)
        clock.now += LOOK_S
        process.keep_alive()
        clock.now += max(BACKOFF_S)
        process.keep_alive()
        await_another(process, stand, sidecar)
        assert process.pid is not None
        servers.append(psutil.Process(process.pid).ppid())
    assert servers[0] == first != servers[1]
    assert process.restarts == 2
    process.stop()
    assert not psutil.pid_exists(servers[1])


@pytest.mark.parametrize("code", [UNUSABLE, 3])
def test_a_sidecar_that_is_given_up_leaves_no_fork_server(stand: Stand, code: int) -> None:
    clock = Clock()
    process = supervised(stand, clock)
    assert process.pid is not None
    parent = psutil.Process(process.pid).ppid()
    stand.end(code)
    while not process.given_up:
        until(lambda: not process.alive)
        clock.now += LOOK_S
        process.keep_alive()
        clock.now += max(BACKOFF_S)
        process.keep_alive()
    assert not psutil.pid_exists(parent)
    assert process.exit_code == code


def test_sidecars_on_gpus_do_not_fork(tmp_path: Path) -> None:
    process = sidecar_on("cuda:0", Clock())
    seen = tmp_path / "arguments"
    code = f"import sys; open({str(seen)!r}, 'w').write(' '.join(sys.argv))"
    process.command[:] = [sys.executable, "-c", code]
    process.start()
    until(lambda: not process.alive)
    assert seen.read_text() == "-c"
