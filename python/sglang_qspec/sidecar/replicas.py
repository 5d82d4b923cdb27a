"""Runs several sidecars of one command line, one for each GPU, and restarts those that fail."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sglang_qspec import config, values
from sglang_qspec.errors import ConfigError
from sglang_qspec.sidecar.child_process import LOOK_S, PROGRAM, UNUSABLE, Supervised


def endpoint_of(endpoint: str, number: int) -> str:
    """Address of replica `number`: the path of an ipc socket with a suffix, or the next tcp ports.

    Raises ConfigError for a tcp address without a port that can be counted up.
    """
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-{number}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535 - number:
        raise ConfigError(
            f"--endpoint is {endpoint!r}, but with --replicas it must be tcp://HOST:PORT, and the "
            "next ports must exist"
        )
    return f"{host}:{int(port) + number}"


def commands(options: argparse.Namespace, arguments: Sequence[str]) -> list[list[str]]:
    """Command line of each replica: `arguments`, followed by the options that differ.

    Raises ConfigError if an option cannot be divided among the replicas.
    """
    if options.device not in ("cpu", "cuda"):
        raise ConfigError(
            f"--device is {options.device!r}, but with --replicas it must be cuda (replica N runs "
            "on cuda:N) or cpu"
        )
    last = options.metrics_port + options.replicas - 1
    if options.metrics_port and last > 65535:
        raise ConfigError(
            f"--metrics-port is {options.metrics_port}, but with --replicas {options.replicas} the "
            f"last port would be {last}: give at most {65536 - options.replicas}"
        )
    try:
        cores = sorted(values.parse_cores(options.cores))
    except ValueError as error:
        raise ConfigError(f"--cores is {options.cores!r}, but must be {error}") from None
    each = len(cores) // options.replicas
    if cores and not each:
        raise ConfigError(
            f"--cores is {options.cores!r}, but {options.replicas} replicas need at least one CPU "
            "each"
        )
    found = []
    for number in range(options.replicas):
        own = cores[number * each : (number + 1) * each]
        command = [
            *PROGRAM,
            *arguments,
            "--replicas=1",
            f"--endpoint={endpoint_of(options.endpoint, number)}",
            f"--device={options.device}" + (f":{number}" if options.device == "cuda" else ""),
            f"--cores={','.join(map(str, own))}",
            f"--supervisor-pid={os.getpid()}",
        ]
        if options.metrics_port:
            command.append(f"--metrics-port={options.metrics_port + number}")
        found.append(command)
    return found


def run(options: argparse.Namespace, arguments: Sequence[str], stopping: threading.Event) -> int:
    """Run the replicas until `stopping`, and restart those that fail.

    Returns 0; or, once no replica will be started again, UNUSABLE if the settings cannot work, and
    1 after other failures. Raises ConfigError as `commands` does.
    """
    replicas = [
        Supervised(
            command,
            visible=config.visible_gpus(),
            forks=options.device == "cpu",
            name=f"replica {number}",
        )
        for number, command in enumerate(commands(options, arguments))
    ]
    for replica in replicas:
        replica.start()
    try:
        while not stopping.wait(LOOK_S):
            for replica in replicas:
                replica.keep_alive()
            if all(replica.given_up for replica in replicas):
                return UNUSABLE if any(r.exit_code == UNUSABLE for r in replicas) else 1
        return 0
    finally:
        with ThreadPoolExecutor(len(replicas)) as pool:
            list(pool.map(Supervised.stop, replicas))
