"""Several servers share two sidecars behind slow proxies, which are cut, killed and restarted.

Target and draft model are the same small model with random weights. Each request has its own
sampling seed, so the texts vary and the draft model still samples the target's tokens.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.engine.sidecar.endpoints import PREFIX
from sglang_qspec.link import keys
from sglang_qspec.tools.ports import free_port
from test.engine.awaiting import awaiting
from test.engine.server.running import COMMON, of_sidecar, state, until
from test.engine.slow_proxy import SlowProxy
from test.engine.test_tensor_parallel import TENSOR_PARALLEL
from test.preloaded.server import Server

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PROMPTS = [f"Item {number} of the list of {number + 3} things is" for number in range(16)]
CLIENTS = 2
"""Clients of each server."""
SECONDS = 20.0
"""Time of the disturbances before each restart."""
DELAYS_S = (0.0, 0.002, 0.02, 0.1)


class Sidecar:
    """A sidecar behind a proxy, which can be killed and started again."""

    def __init__(self, model: Path, key_file: Path, core: int, *options: str) -> None:
        self.port = free_port()
        self.proxy = SlowProxy(self.port)
        arguments = [
            *("--model-path", str(model), "--endpoint", f"tcp://127.0.0.1:{self.port}"),
            *("--key-file", str(key_file), "--device", "cpu", "--dtype", "float32"),
            *("--cores", str(core), "--max-total-tokens", "16384", *options),
        ]
        self._command = [sys.executable, "-m", "sglang_qspec.sidecar", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.DEVNULL)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.poll() is None, "the sidecar ended by itself"
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    keys.create(folder / "key")
    return folder / "key"


@pytest.fixture(scope="module")
def sidecars(small_target: Path, key_file: Path) -> Iterator[list[Sidecar]]:
    core = max(os.sched_getaffinity(0))
    pair = [Sidecar(small_target, key_file, core) for _ in range(2)]
    with pair[0].proxy, pair[1].proxy:
        for each in pair:
            each.start()
        try:
            yield pair
        finally:
            for each in pair:
                each.kill()


def flags(sidecars: list[Sidecar], key_file: Path) -> list[str]:
    """The flags of a server that uses the sidecars."""
    return [
        *("--speculative-algorithm", "QSPEC", "--speculative-qspec-key-file", str(key_file)),
        *("--speculative-qspec-endpoint", ",".join(each.proxy.endpoint for each in sidecars)),
    ]


@pytest.fixture(scope="module", params=[2, 4])
def servers(
    request: pytest.FixtureRequest,
    small_target: Path,
    key_file: Path,
    sidecars: list[Sidecar],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[Server]]:
    arguments = [*COMMON, "--max-running-requests", "4", *flags(sidecars, key_file)]
    core = min(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        environment = awaiting(tmp_path_factory.mktemp("plugin"))
        fleet = [
            Server(small_target, arguments, cores=(core,), environment=environment)
            for _ in range(request.param)
        ]
        for server in fleet:
            stack.callback(server.stop)
            server.launch()
        for server in fleet:
            server.start()
        for server in fleet:
            until(partial(all_ready, server))
        yield fleet


def all_ready(server: Server) -> bool:
    return {each["state"] for each in state(server)["sidecars"]} == {"ready"}


def ask(server: Server, number: int, **custom: Any) -> list[int]:
    """The output ids for one prompt."""
    sampling = {"temperature": 0.7, "sampling_seed": number, "max_new_tokens": 32}
    body = {"text": PROMPTS[number], "sampling_params": {**sampling, "custom_params": custom}}
    answer: list[int] = server.post("/generate", body)["output_ids"]
    return answer


class Load:
    """Clients of all servers that compare each answer with the expected one."""

    def __init__(
        self, servers: Sequence[Server], expected: list[list[int]], pool: ThreadPoolExecutor
    ) -> None:
        self.going = True
        self._expected = expected
        self._clients: list[Future[int]] = [
            pool.submit(self._client, server, client)
            for server in servers
            for client in range(CLIENTS)
        ]

    def _client(self, server: Server, number: int) -> int:
        count = 0
        while self.going:
            number = (number + 5) % len(PROMPTS)
            assert ask(server, number) == self._expected[number], "a changed answer"
            count += 1
        return count

    def end(self) -> int:
        """The number of answers. Raises the error of a client."""
        self.going = False
        return sum(client.result() for client in self._clients)


def disturb(sidecars: list[Sidecar], rng: random.Random) -> None:
    """Delay, cut or stop a sidecar at random."""
    one = rng.choice(sidecars)
    match rng.randrange(4):
        case 0 | 1:
            one.proxy.delay_s = rng.choice(DELAYS_S)
        case 2:
            one.proxy.cut()
        case 3:
            one.signal(signal.SIGSTOP)
            time.sleep(rng.choice((0.3, 1.0, 4.0)))
            one.signal(signal.SIGCONT)


def restart(one: Sidecar, rng: random.Random) -> None:
    """Kill a sidecar and start it again. Its start takes much longer than other disturbances."""
    one.kill()
    time.sleep(rng.uniform(0.0, 1.0))
    one.start()


def drafts_are_accepted(server: Server) -> None:
    before = of_sidecar(state(server)["accepted_tokens"])
    until(lambda: of_sidecar(state(server)["accepted_tokens"]) > before + 20)


def test_no_answer_changes_and_drafts_come_back_whatever_happens_to_the_sidecars(
    servers: list[Server], sidecars: list[Sidecar]
) -> None:
    expected = [ask(servers[0], number, qspec_enabled=False) for number in range(len(PROMPTS))]
    assert min(len(set(answer)) for answer in expected) > 10
    rng = random.Random(len(servers))
    with ThreadPoolExecutor(CLIENTS * len(servers)) as pool:
        load = Load(servers, expected, pool)
        try:
            for server in servers:
                drafts_are_accepted(server)
            for one in rng.sample(sidecars, len(sidecars)):
                until_s = time.monotonic() + SECONDS
                while time.monotonic() < until_s:
                    disturb(sidecars, rng)
                    time.sleep(rng.uniform(0.0, 2.0))
                for each in sidecars:
                    each.proxy.delay_s = 0.0
                restart(one, rng)
                for server in servers:
                    drafts_are_accepted(server)
                for server in servers:
                    until(partial(all_ready, server))
        finally:
            load.going = False
        assert load.end() > len(servers)
    for server in servers:
        described = state(server)
        assert described["live_requests"] == 0
        assert not described["failed"], server.log[-4000:]
    assert sum(state(server)["handovers"] for server in servers) > 0


def test_two_ranks_of_a_target_take_the_same_changes_of_its_endpoints(
    small_target: Path, key_file: Path, sidecars: list[Sidecar], tmp_path: Path
) -> None:
    def update(**changes: float) -> Any:
        return server.post("/set_internal_state", {"server_args": changes})

    one = PREFIX + sidecars[0].proxy.endpoint
    arguments = [*TENSOR_PARALLEL, *flags(sidecars, key_file)]
    with Server(small_target, arguments, environment=awaiting(tmp_path)) as server:
        until(lambda: all_ready(server))
        expected = [ask(server, number, qspec_enabled=False) for number in range(4)]
        for change, count in ((0, 1), (1, 2)):
            assert update(**{one: change}) == [True]
            assert len(state(server)["sidecars"]) == count
            assert update(**{PREFIX + "tcp://127.0.0.1:1": 0}) == [False]
            assert [ask(server, number) for number in range(4)] == expected
        until(lambda: all_ready(server))
        assert [ask(server, number) for number in range(4)] == expected
        assert of_sidecar(state(server)["accepted_tokens"]) > 0
        assert not state(server)["failed"], server.log[-4000:]
