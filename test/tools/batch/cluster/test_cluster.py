"""`qspec batch --ray` on a real Ray cluster of two nodes, with fake servers that answer at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from test.tools.batch.cluster.nodes import Nodes, two_nodes, until
from test.tools.batch.fakes import (
    assert_complete,
    environment_with_fake_sglang,
    records_of,
    write_lines,
)
from test.tools.batch.test_killed import start

PROMPTS = [f"prompt {i}" for i in range(1200)]
ACTOR, SERVER = "ray::ServerActor", "sglang.launch_server"
FLAGS = ("--model", "/none", "--server-cpus", "1", "--in-flight", "2")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment_with_fake_sglang(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def nodes(environment: dict[str, str]) -> Iterator[Nodes]:
    with two_nodes(environment) as nodes:
        yield nodes


def test_few_lines_need_one_server_and_a_failed_start_is_explained(
    tmp_path: Path, nodes: Nodes, environment: dict[str, str]
) -> None:
    path, output = write_lines(tmp_path / "in.jsonl", PROMPTS[:20]), tmp_path / "out.jsonl"
    given = (path, "--output", output, "--ray", nodes.address, *FLAGS)
    process = start(*given, "--", "fails", environment=environment)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "server 1: the start of the server ended with code 1" in out
    assert "the model is missing" in out

    output.unlink()
    process = start(*given, environment=environment)
    most = 0
    while process.poll() is None:
        most = max(most, len(nodes.processes(SERVER)))
        time.sleep(0.02)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert_complete(output, PROMPTS[:20])
    assert most == 1


def test_servers_without_a_node_do_not_delay_the_end(
    tmp_path: Path, nodes: Nodes, environment: dict[str, str]
) -> None:
    path, output = write_lines(tmp_path / "in.jsonl", PROMPTS[:500]), tmp_path / "out.jsonl"
    given = (path, "--output", output, "--ray", nodes.address, *FLAGS, "--max-servers", 40)
    process = start(*given, environment=environment)
    out, _ = process.communicate(timeout=900)  # to wait for each of them would take 1140 s
    assert process.returncode == 0, out
    assert_complete(output, PROMPTS[:500])


def test_a_server_that_no_node_can_hold_is_refused(
    tmp_path: Path, nodes: Nodes, environment: dict[str, str]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", PROMPTS[:1])
    given = (path, "--output", tmp_path / "out.jsonl", "--ray", nodes.address)
    process = start(*given, "--model", "/none", "--server-cpus", "2", environment=environment)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "no node of the cluster has 2 CPUs and 0 GPUs for a server" in out


def test_an_address_without_a_cluster_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", PROMPTS[:1])
    given = (path, "--output", tmp_path / "out.jsonl", "--ray", "nonsense")
    out, _ = (process := start(*given, environment=environment)).communicate(timeout=600)
    assert process.returncode == 1
    assert "--ray is 'nonsense', but must be 'local', 'auto', or the HOST:PORT of a Ray" in out


def test_killed_actors_servers_nodes_and_clients_lose_and_repeat_no_line(
    tmp_path: Path, nodes: Nodes, environment: dict[str, str]
) -> None:
    path, output = write_lines(tmp_path / "in.jsonl", PROMPTS), tmp_path / "out.jsonl"
    given = (path, "--output", output, "--ray", nodes.address, *FLAGS)

    def more_records(count: int) -> Callable[[], bool]:
        wanted = len(records_of(output)) + count
        return lambda: len(records_of(output)) >= wanted

    process = start(*given, environment=environment)
    until(lambda: len(nodes.processes(ACTOR)) == len(nodes.processes(SERVER)) == 2, process)
    for victim in (ACTOR, SERVER):
        nodes.processes(victim)[0].kill()
        until(more_records(60), process)
    process.kill()
    process.communicate()
    before = len(records_of(output))
    assert before < len(PROMPTS) / 2
    deadline = time.monotonic() + 200
    while nodes.processes(SERVER):  # Ray ends the actors of a killed client
        assert time.monotonic() < deadline
        time.sleep(0.1)

    process = start(*given, "--resume", environment=environment)
    until(lambda: len(nodes.processes(SERVER)) == 2, process)
    until(more_records(60), process)
    nodes.remove_one()  # so this test is the last one of the file
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert f"({before} more were settled before)" in out
    assert_complete(output, PROMPTS)
    assert not nodes.processes(SERVER)
