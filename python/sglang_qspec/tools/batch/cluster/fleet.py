"""The servers and sidecars of a batch on the cluster that it is connected to."""

from __future__ import annotations

import argparse
import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from sglang_qspec.errors import BatchError, ConfigError
from sglang_qspec.link import keys
from sglang_qspec.tools.batch.cluster import session
from sglang_qspec.tools.batch.cluster.actors import ServerSpec, SidecarActor
from sglang_qspec.tools.batch.cluster.ray_server import RayServer

logger = logging.getLogger(__name__)

SIDECAR_START_S = 600.0
"""Time limit for the actors of the sidecars, which may wait for a node; then the batch stops."""
SIDECAR_CLOSE_S = 15.0


@contextlib.contextmanager
def servers(options: argparse.Namespace) -> Iterator[list[RayServer]]:
    """The servers of settled options, not open yet; sidecars for all of them run meanwhile.

    Raises QSpecError if the cluster is too small, or if the sidecars do not start.
    """
    target_gpus = options.target_gpus
    if target_gpus is None:
        target_gpus = int(session.total("GPU") > 0)
    cpus = options.server_cpus or (1 if target_gpus else 2)
    own_gpus = 0 if options.sidecars else options.draft_gpus
    most = options.max_servers or _most(cpus, target_gpus + own_gpus, options.min_servers)
    logger.info(
        "up to %d servers, each with %d CPUs and %d GPUs", most, cpus, target_gpus + own_gpus
    )
    with _sidecars(options, on_cuda=target_gpus > 0) as (endpoints, key):
        spec = ServerSpec(
            model=options.model,
            draft_model=options.draft_model,
            flags=tuple(options.server_arguments),
            timeout=options.timeout,
            in_flight=options.in_flight,
            target_gpus=target_gpus,
            draft_gpus=own_gpus,
            cores=cpus,
            endpoints=endpoints,
            key=key,
        )
        yield [RayServer(number, spec) for number in range(1, most + 1)]


def _most(cpus: int, gpus: int, fewest: int) -> int:
    """The number of servers that all nodes hold together, at least `fewest`.

    Raises ConfigError if no node can hold one.
    """
    needs = {"CPU": cpus, "GPU": gpus}
    holds = sum(
        min(int(node.get(name, 0) // count) for name, count in needs.items() if count)
        for node in session.nodes()
    )
    if not holds:
        raise ConfigError(
            f"no node of the cluster has {cpus} CPUs and {gpus} GPUs for a server; give fewer as "
            "--server-cpus, --target-gpus or --draft-gpus, or --max-servers if the cluster grows"
        )
    return max(holds, fewest)


@contextlib.contextmanager
def _sidecars(
    options: argparse.Namespace, *, on_cuda: bool
) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Endpoints and key file of the shared sidecars; they end with the context."""
    if not options.sidecars:
        yield (), b""
        return
    with tempfile.TemporaryDirectory(prefix="qspec-batch-") as folder:
        keys.create(Path(folder, "key"))
        key = Path(folder, "key").read_bytes()
    remote: Any = ray.remote(SidecarActor).options(
        num_cpus=1,
        num_gpus=options.draft_gpus,
        resources={options.sidecar_resource: 1} if options.sidecar_resource else None,
        max_restarts=0,
    )
    on_cuda = on_cuda and options.draft_gpus > 0
    actors = [remote.remote(options.draft_model, key, on_cuda) for _ in range(options.sidecars)]
    try:
        yield tuple(_endpoints(actors)), key
    finally:
        with contextlib.suppress(RayError):
            ray.get([actor.close.remote() for actor in actors], timeout=SIDECAR_CLOSE_S)
        for actor in actors:
            ray.kill(actor)


def _endpoints(actors: list[Any]) -> list[str]:
    try:
        found: list[str] = ray.get(
            [actor.endpoint.remote() for actor in actors], timeout=SIDECAR_START_S
        )
    except RayError as error:
        raise BatchError(f"the sidecars do not start on the cluster: {error}") from None
    logger.info("sidecars at %s", ", ".join(found))
    return found
