"""Prometheus reads the figures that the loop publishes, and never waits for the loop."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.link import LinkServer, PrivateEndpoint
from sglang_qspec.messages import PROTOCOL, Heartbeat, Welcome
from sglang_qspec.sidecar.figures import Parts
from sglang_qspec.sidecar.metrics import PUBLISH_S, STALE_S, SidecarMetrics
from test.engine.simulation import Clock
from test.sidecar.drafter_driver import DrafterDriver
from test.sidecar.scripted import ScriptedModel


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Iterator[SidecarMetrics]:
    found = SidecarMetrics("127.0.0.1", 0, clock)
    yield found
    found.close()


@pytest.fixture
def driver() -> DrafterDriver:
    return DrafterDriver(ScriptedModel())


@pytest.fixture
def publish(metrics: SidecarMetrics, driver: DrafterDriver) -> Iterator[Callable[[], None]]:
    with PrivateEndpoint() as private:
        welcome = Welcome(PROTOCOL, "scripted", 1000, 256)
        server = LinkServer(private.address, welcome, "f", lambda: Heartbeat(0, 0, 0, 0))
        yield lambda: metrics.publish(Parts(driver.drafter, driver.model.rows, server))
        server.close()


def get(metrics: SidecarMetrics, path: str) -> tuple[int, str]:
    with closing(HTTPConnection("127.0.0.1", metrics.port, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def value(metrics: SidecarMetrics, name: str) -> float:
    status, text = get(metrics, "/metrics")
    assert status == 200
    (line,) = [line for line in text.splitlines() if line.startswith(f"qspec_sidecar_{name} ")]
    return float(line.split()[1])


def test_the_sidecar_is_healthy_while_its_loop_publishes(
    metrics: SidecarMetrics, publish: Callable[[], None], clock: Clock
) -> None:
    assert get(metrics, "/health")[0] == 503
    assert get(metrics, "/metrics") == (200, "")
    publish()
    assert get(metrics, "/health") == (200, "ok\n")
    clock.now += STALE_S
    assert get(metrics, "/health")[0] == 503
    publish()
    assert get(metrics, "/health")[0] == 200


def test_the_series_have_the_figures_of_the_latest_snapshot(
    metrics: SidecarMetrics, publish: Callable[[], None], driver: DrafterDriver, clock: Clock
) -> None:
    driver.submit("a", [1, 2, 3], completions=3)
    driver.step(4)
    publish()
    drafted = driver.drafter.statistics.drafted_tokens
    assert value(metrics, "requests") == 1
    assert value(metrics, "drafting_rows") == 3
    assert value(metrics, "kv_rows") == driver.model.rows.open_rows > 0
    used = driver.model.rows.total_slots - driver.model.rows.free_slots
    assert value(metrics, "kv_tokens") == used > 0
    assert value(metrics, "kv_tokens_available") == 4096
    assert value(metrics, "backlog_seconds") == pytest.approx(
        driver.drafter.overload.backlog_s, abs=1
    )
    driver.run()
    publish()  # too early
    assert value(metrics, "drafted_tokens_total") == drafted > 0
    clock.now += PUBLISH_S
    publish()
    assert value(metrics, "drafted_tokens_total") == 30
    driver.submit("long", [5] * 300)
    clock.now += PUBLISH_S
    publish()
    assert value(metrics, "declined_requests_total") == 1
    driver.leave("a")


def test_other_paths_are_not_found(metrics: SidecarMetrics) -> None:
    assert get(metrics, "/")[0] == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.7", "no such host"])
def test_an_address_that_cannot_be_used_is_an_error_with_both_options(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            SidecarMetrics(host, port)
    words = f"--metrics-host and --metrics-port are {host!r} and {port}, but this address cannot"
    assert str(error.value).startswith(words)


def test_a_client_that_sends_nothing_delays_no_other(
    metrics: SidecarMetrics, publish: Callable[[], None]
) -> None:
    publish()
    with socket.create_connection(("127.0.0.1", metrics.port)):
        assert get(metrics, "/health")[0] == 200


def answering() -> int:
    """Number of threads that answer requests."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_open_requests_take_few_threads_and_keep_nobody_out(
    metrics: SidecarMetrics, publish: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_qspec.sidecar.metrics.MAX_OPEN", 3)
    publish()
    before = answering()
    with ExitStack() as stack:
        for _ in range(10):
            client = socket.create_connection(("127.0.0.1", metrics.port))
            stack.enter_context(client)
            client.sendall(b"GET /health HTTP/1.0\r\n")  # the request never ends
        assert get(metrics, "/health")[0] == 200
        deadline = time.monotonic() + 60
        while answering() - before > 3:  # a thread ends after its request
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_connection_that_breaks_is_one_line_in_the_log(
    metrics: SidecarMetrics,
    publish: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    publish()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", metrics.port)) as client:
            client.sendall(b"GET /health HTTP/1.0\r\n")
            # The close then resets the connection.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    deadline = time.monotonic() + 60
    while "a request failed" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert get(metrics, "/health")[0] == 200
    assert caplog.text.count("a request failed") == 1
    assert "Traceback" not in caplog.text + capfd.readouterr().err
