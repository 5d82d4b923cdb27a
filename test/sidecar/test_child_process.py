"""The real process with the real draft model, over a real socket; started once."""

import os
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_qspec.config import QSpecConfig
from sglang_qspec.link import LinkState, SidecarLink
from sglang_qspec.messages import PROTOCOL, Close, Heartbeat, Hello, Rest, Submit
from sglang_qspec.tools.models import DemoModels
from sglang_qspec.tools.ports import free_port
from test.sidecar.resident import check_memory
from test.sidecar.running import CORE, IDS, START_S, Connection, hello_of, running


def until(happened: Callable[[], object], what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{what} within {seconds:g} s"
        time.sleep(0.02)


def thread_nice(pid: int, thread: int) -> int:
    """Niceness of a thread of a process."""
    with open(f"/proc/{pid}/task/{thread}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[16])


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def served(models: DemoModels, metrics_port: int) -> Iterator[Connection]:
    settings = QSpecConfig(dtype="float32", mem_fraction=0.05, draft_slots=8)
    metrics = f"--metrics-port={metrics_port}"
    with (
        running(settings, str(models.target), metrics) as sidecar,
        Connection(*sidecar, hello_of(models.target)) as server,
    ):
        yield server


def test_the_sidecar_streams_the_completions_of_a_submitted_prompt(served: Connection) -> None:
    prompt = [504, 3575, 282, 4649, 314]
    served.link.send(Submit(1, prompt, 0, 12, 3, 0.8, ignore_eos=True))
    served.link.send(Submit(2, prompt, 0, 12, 3, 0.8, ignore_eos=True))
    served.until(lambda: len(served.finished) == 6)
    for completion in range(3):
        assert len(served.told[1, completion]) == 12
        assert served.told[1, completion] == served.told[2, completion]
    assert served.told[1, 0] != served.told[1, 1] != served.told[1, 2]
    for submission in (1, 2):
        served.link.send(Close(submission))


def test_a_sidecar_that_rests_reads_messages_and_drafts_nothing(served: Connection) -> None:
    def beat() -> Heartbeat:
        """The answer to a Ping that is sent from now on."""
        before = served.link.heartbeat
        served.until(lambda: served.link.heartbeat is not before)
        found = served.link.heartbeat
        assert found is not None
        return found

    served.link.send(Rest(True))
    served.link.send(Submit(10, [504, 3575, 282, 4649], 0, 12, 1, 0.8, ignore_eos=True))
    beat()
    first, second = beat(), beat()
    assert (first.requests, second.requests) == (1, 1)
    assert first.pass_seconds == second.pass_seconds
    assert (10, 0) not in served.told
    served.link.send(Rest(False))
    served.until(lambda: (10, 0) in served.finished)
    served.link.send(Close(10))


def test_the_sidecar_takes_the_memory_that_is_announced_and_no_more(served: Connection) -> None:
    served.link.send(Submit(9, [504, 3575, 282], 0, 12, 1, 0.8, ignore_eos=True))
    served.until(lambda: (9, 0) in served.finished)
    served.link.send(Close(9))
    check_memory(served.process.pid, 0.05)


def test_the_sidecar_runs_on_its_own_cores_and_sleeps_when_idle(served: Connection) -> None:
    process = psutil.Process(served.process.pid)
    assert process.cpu_affinity() == [CORE]
    assert process.nice() == 0
    served.until(lambda: served.link.heartbeat is not None and not served.link.heartbeat.requests)
    before = sum(process.cpu_times()[:2])
    time.sleep(2.0)
    assert sum(process.cpu_times()[:2]) - before < 0.2


def test_prometheus_reads_the_figures_of_a_running_sidecar(
    served: Connection, metrics_port: int
) -> None:
    url = f"http://127.0.0.1:{metrics_port}"

    def series() -> dict[str, float]:
        text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
        families = text_string_to_metric_families(text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    before = series()
    served.link.send(Submit(3, [5, 6, 8], 0, 20, 2, 0.5, ignore_eos=True))
    served.until(lambda: {(3, 0), (3, 1)} <= served.finished)
    drafted = "qspec_sidecar_drafted_tokens_total"
    # Not exactly 40 more: `before` may be older than the last tokens of the test before.
    until(lambda: series()[drafted] >= before[drafted] + 40, "the tokens were not counted")
    now = series()
    assert now["qspec_sidecar_servers"] == 1
    assert now["qspec_sidecar_kv_tokens_available"] > now["qspec_sidecar_kv_tokens"]
    assert urllib.request.urlopen(f"{url}/health", timeout=60).status == 200
    served.link.send(Close(3))


def test_a_server_with_another_tokenizer_is_refused_with_the_reason(served: Connection) -> None:
    other = SidecarLink(served.endpoint.address, Hello(PROTOCOL, IDS, "another"))

    def refused() -> bool:
        other.receive()
        return other.state is LinkState.REFUSED

    until(refused, "the sidecar did not refuse the server")
    assert "tokenizer" in (other.refusal or "")
    other.close()


def test_invalid_bytes_and_an_overlong_prompt_do_not_end_the_sidecar(served: Connection) -> None:
    served.link.send(Submit(7, [5] * 9000, 0, 10, 2, 0.5))
    served.until(lambda: 7 in served.declined)
    assert "9000 tokens" in served.declined[7]
    served.link.send(Submit(8, [5, 6, 7], 0, 4, 1, 0.5, ignore_eos=True))
    served.until(lambda: (8, 0) in served.finished)
    assert len(served.told[8, 0]) == 4


def test_a_killed_sidecar_is_forked_again_and_drafts_the_same(served: Connection) -> None:
    def completion(submission: int) -> list[int]:
        served.link.send(Submit(submission, [5, 6, 7], 0, 16, 1, 0.8, ignore_eos=True))
        served.until(lambda: (submission, 0) in served.finished)
        return served.told[submission, 0]

    def has_another() -> bool:
        served.process.keep_alive(connected=served.link.state is LinkState.READY)
        served.link.receive()
        return served.process.pid not in pids and served.link.state is LinkState.READY

    first = completion(100)
    assert served.process.pid is not None
    process = psutil.Process(served.process.pid)
    parent, pids = process.ppid(), {process.pid}
    for number in (1, 2):
        process.kill()
        until(lambda: not served.process.alive, "the sidecar did not end")
        pids.add(parent)  # which counts as the sidecar before the fork
        until(has_another, "no sidecar was forked", START_S)
        assert completion(100 + number) == first
        assert served.process.pid is not None
        process = psutil.Process(served.process.pid)
        assert process.ppid() == parent
        assert process.nice() == 0
        pids.add(process.pid)
    check_memory(process.pid, 0.05)


def test_sigterm_ends_a_busy_sidecar_cleanly(served: Connection) -> None:
    served.link.send(Submit(9, [5, 6, 7], 0, 400, 8, 0.9, ignore_eos=True))
    served.until(lambda: (9, 0) in served.told)
    pid = served.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    until(lambda: not served.process.alive, "the sidecar did not end")
    assert served.process.exit_code == 0
    assert not psutil.pid_exists(pid)
    assert os.listdir(served.endpoint.directory) == ["owner"]
    served.process.stop()


def test_a_sidecar_loads_at_normal_priority_and_ends_with_its_parent(models: DemoModels) -> None:
    # The parent dies while the sidecar still loads the model, its longest step.
    program = (
        "import resource, sys, time\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, int(sys.argv[2])))\n"
        "from sglang_qspec.config import QSpecConfig\n"
        "from sglang_qspec.sidecar.child_process import SidecarProcess\n"
        "process = SidecarProcess(QSpecConfig(), model_path=sys.argv[1], quantization=None,\n"
        "    endpoint='ipc:///nowhere/link', device='cpu')\n"
        "process.start()\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(models.target), str(limit)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    try:
        server = psutil.Process(int(parent.stdout.readline()))
        until(server.children, "the sidecar was not forked", START_S)
        (child,) = server.children()
        until(
            lambda: child.rlimit(psutil.RLIMIT_NOFILE) == (limit, limit),
            "the sidecar did not raise its limit of open files",
            60.0,
        )
        until(lambda: child.num_threads() > 1, "the sidecar did not begin to load its model", 60.0)
        assert {thread_nice(child.pid, thread.id) for thread in child.threads()} == {0}
        assert os.getsid(child.pid) == os.getsid(0)  # in another session niceness has no effect
    finally:
        parent.kill()
        parent.wait()
    child.wait(timeout=60)
    server.wait(timeout=60)


@pytest.mark.thorough
def test_a_background_sidecar_gets_ready_beside_work_that_takes_its_core(
    models: DemoModels,
) -> None:
    work = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(work.pid, {CORE})
    settings = QSpecConfig(mem_fraction=0.02)
    with running(settings, str(models.draft), background=True) as (process, endpoint):
        link = SidecarLink(endpoint.address, hello_of(models.draft))
        try:
            # The loop sends the answer when it runs, which takes long in the idle class.
            until(lambda: idle_threads(process.pid), "the sidecar did not load", START_S)
            work.kill()
            until(lambda: link.receive() == [] and link.state is LinkState.READY, "no answer")
            assert psutil.Process(process.pid).nice() == 19
        finally:
            work.kill()
            link.close()


def idle_threads(pid: int | None) -> bool:
    """Whether all threads of the process are in the idle class."""
    threads = psutil.Process(pid).threads()
    return all(os.sched_getscheduler(thread.id) == os.SCHED_IDLE for thread in threads)
