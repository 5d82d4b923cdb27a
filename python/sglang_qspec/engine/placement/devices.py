"""Decides on which device the server's own sidecar runs, and how much memory it gets there.

The process that reads the arguments decides, before the target sizes its KV. It measures GPUs with
NVML, which needs no CUDA context.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import math
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_qspec import config
from sglang_qspec.config import SHARED_FRACTION, QSpecConfig, flag
from sglang_qspec.engine.placement.processes import Placement
from sglang_qspec.errors import ConfigError
from sglang_qspec.link import PrivateEndpoint
from sglang_qspec.sidecar.memory import GIB, RUNTIME_BYTES, gib

logger = logging.getLogger(__name__)

UNUSED = 0.05
"""Largest fraction of a GPU's memory in use that counts as unused."""
KV_BYTES = 2 * GIB
"""Minimum KV of the sidecar by default, in bytes, on a GPU that others use too."""
CONTEXT_BYTES = GIB
"""Memory of the target's CUDA context, in bytes. SGLang measures the free memory, to which its
fraction refers, when the context has already taken this memory."""
MOST_STATIC = 0.95
"""Largest fraction of a shared GPU's memory for the target's static memory and the sidecar
together. The rest is for the target's activations and graphs."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees."""

    index: int
    """Its number among the visible GPUs."""
    uuid: str
    total: int
    """Bytes of memory."""
    used: int
    """Bytes that any process uses."""

    @property
    def free(self) -> int:
        return self.total - self.used


@dataclass(frozen=True)
class Decision:
    """A placement, and the GPU it is on."""

    placement: Placement
    gpu: Gpu | None = None
    """None on a CPU, or if NVML does not answer."""


def visible_gpus() -> list[Gpu]:
    """All GPUs that this process sees; none if NVML does not answer, as in a MIG instance."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return []
    found = []
    try:
        for index in range(torch.cuda.device_count()):
            handle = torch.cuda._get_pynvml_handler(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            found.append(Gpu(index, uuid, int(memory.total), int(memory.used)))
    except (pynvml.NVMLError, RuntimeError) as error:  # torch cannot map the name of a MIG instance
        logger.info("cannot measure the memory of the GPUs (%s)", error)
        return []
    return found


def held_gpus(args: Any) -> frozenset[int]:
    """Numbers of the GPUs on which the ranks of this server run on this machine.

    `args` has SGLang's server arguments. SGLang's `Engine`, and its controller for data
    parallelism, compute the numbers in the same way.
    """
    stages = max(1, args.pp_size // args.nnodes)
    ranks = max(1, args.tp_size // max(1, args.nnodes // args.pp_size))
    replicas = 1 if args.enable_dp_attention else args.dp_size
    return frozenset(
        args.base_gpu_id
        + replica * stages * ranks * args.gpu_id_step
        + stage * ranks
        + rank * args.gpu_id_step
        for replica in range(replicas)
        for stage in range(stages)
        for rank in range(ranks)
    )


def decide(
    settings: QSpecConfig,
    *,
    on_cpu: bool,
    held: frozenset[int],
    gpus: Sequence[Gpu],
    weights: int | None,
    claim: Callable[[Gpu], bool],
) -> Decision:
    """Choose the sidecar's device, and its fraction of the device's memory.

    A device in `settings` always wins. Without one, the sidecar takes the last unused GPU that is
    not in `held`. If there is none, it takes a GPU outside `held` with at least half of its memory
    free. `claim` must grant both. Otherwise the sidecar shares the target's GPU. `weights` is the
    size of the draft model in bytes, or None if unknown.
    """
    if on_cpu and not settings.draft_device.startswith("cuda"):
        return _on_cpu(settings)
    if settings.draft_device == "cpu":
        return _on_cpu(settings)
    asked = settings.draft_device.removeprefix("cuda").removeprefix(":")
    if settings.draft_device:
        index = int(asked or 0)
        gpu = next((gpu for gpu in gpus if gpu.index == index), None)
        shared = not on_cpu and index in held
        return _placed(settings, index, gpu, shared=shared, alone=not shared, weights=weights)
    others = sorted((gpu for gpu in gpus if gpu.index not in held), key=lambda gpu: -gpu.index)
    for gpu in others:
        if gpu.used <= UNUSED * gpu.total and claim(gpu):
            return _placed(settings, gpu.index, gpu, shared=False, alone=True, weights=weights)
    for gpu in sorted(others, key=lambda gpu: gpu.used / gpu.total):
        if gpu.free >= gpu.total / 2 and claim(gpu):
            return _placed(settings, gpu.index, gpu, shared=False, alone=False, weights=weights)
    index = min(held)
    gpu = next((gpu for gpu in gpus if gpu.index == index), None)
    return _placed(settings, index, gpu, shared=True, alone=False, weights=weights)


def _on_cpu(settings: QSpecConfig) -> Decision:
    fraction = settings.mem_fraction or SHARED_FRACTION
    return Decision(Placement("cpu", mem_fraction=fraction, visible=config.visible_gpus()))


def _placed(
    settings: QSpecConfig,
    index: int,
    gpu: Gpu | None,
    *,
    shared: bool,
    alone: bool,
    weights: int | None,
) -> Decision:
    fraction = settings.mem_fraction
    if not fraction and not alone:
        fraction = default_fraction(gpu, weights)
    return Decision(Placement(f"cuda:{index}", shared, fraction, config.visible_gpus()), gpu)


def default_fraction(gpu: Gpu | None, weights: int | None) -> float:
    """The sidecar's fraction of a GPU that others use too: SHARED_FRACTION, or more if needed."""
    if gpu is None or weights is None:
        return SHARED_FRACTION
    needed = (weights + RUNTIME_BYTES + KV_BYTES) / gpu.total
    return max(SHARED_FRACTION, min(MOST_STATIC, math.ceil(needed * 100) / 100))


def check_sidecar(decision: Decision, weights: int | None) -> None:
    """Raise ConfigError if the sidecar's memory cannot hold a draft model of `weights` bytes."""
    gpu, placement = decision.gpu, decision.placement
    if gpu is None or weights is None:
        return
    given = int((placement.mem_fraction or 1.0) * gpu.total)
    if given <= weights + RUNTIME_BYTES:
        raise ConfigError(
            f"{flag('mem_fraction')} is {placement.mem_fraction:g}, which is {gib(given)} of "
            f"{placement.device}, but the draft model has {gib(weights)} of weights and needs "
            f"{gib(RUNTIME_BYTES)} to run: give it more than "
            f"{(weights + RUNTIME_BYTES) / gpu.total:.2f}, a smaller draft model, or another "
            f"device ({flag('draft_device')})"
        )


def target_fraction(
    decision: Decision, fraction: float, weights: int | None, *, given: bool
) -> float:
    """SGLang's `mem_fraction_static` for a target that shares its GPU with the sidecar.

    `fraction` is SGLang's own value, or the user's value if `given`; the user's value is kept.
    `weights` is the size of the target in bytes on this GPU, or None if unknown. Raises ConfigError
    if both models do not fit.
    """
    placement, gpu = decision.placement, decision.gpu
    # SGLang's fraction refers to the memory that is free before the target's weights load.
    free = None if gpu is None else gpu.free - CONTEXT_BYTES
    taken = placement.mem_fraction * (1.0 if gpu is None or free is None else gpu.total / free)
    shown = f"{placement.mem_fraction:g} of {placement.device}"
    if gpu is not None:
        shown += f" ({gib(placement.mem_fraction * gpu.total)} of {gib(gpu.total)})"
    if given:
        if fraction + taken > MOST_STATIC:
            raise ConfigError(
                f"--mem-fraction-static is {fraction:g} and the sidecar takes {shown}, the same "
                f"GPU: both together may take {MOST_STATIC:g}; leave out --mem-fraction-static, "
                f"give at most {MOST_STATIC - taken:.2f}, or give the sidecar another device "
                f"({flag('draft_device')})"
            )
        return fraction
    left = math.floor((fraction - taken) * 1000) / 1000
    if left <= 0 or (weights is not None and free is not None and left * free <= weights):
        needed = "" if weights is None else f", and has {gib(weights)} of weights"
        has = "nothing" if free is None or left <= 0 else gib(left * free)
        raise ConfigError(
            f"the sidecar takes {shown}, so the target gets {has} of this GPU for weights and "
            f"KV{needed}: lower {flag('mem_fraction')}, take a smaller draft model, or give the "
            f"sidecar another device ({flag('draft_device')})"
        )
    return left


def weight_bytes(path: str) -> int | None:
    """Size of the weight files of a local checkpoint; None for a name on a hub."""
    folder = Path(path).expanduser()
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        sizes = [file.stat().st_size for file in folder.glob(pattern)]
        if sizes:
            return sum(sizes)
    return None


_claims: dict[str, int] = {}
"""File descriptor of each lock that this process holds, by the UUID of the GPU."""


def claim(gpu: Gpu) -> bool:
    """Reserve a GPU for this process's sidecar; False if another server of this user has it.

    The kernel ends the claim with this process. Servers of other users, or in other containers, do
    not see claims; their memory on the GPU keeps the sidecar away.
    """
    if gpu.uuid in _claims:
        return True
    try:
        name = os.path.join(_claim_directory(), f"{gpu.uuid}.lock")
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.info("cannot claim %s for the sidecar (%s)", gpu.uuid, error)
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    _claims[gpu.uuid] = lock
    return True


_endpoints: list[PrivateEndpoint] = []
"""The endpoints that this process has created for its schedulers."""


def shared_endpoint() -> str:
    """A new private address, at which all schedulers of one server reach the same sidecar.

    The process that reads the arguments creates it, because it outlives the schedulers. Raises
    LinkError if no private directory can be created.
    """
    if not _endpoints:
        atexit.register(release)
    _endpoints.append(PrivateEndpoint())
    return _endpoints[-1].address


def release() -> None:
    """End the claims of this process, and remove its endpoints."""
    while _claims:
        os.close(_claims.popitem()[1])
    while _endpoints:
        _endpoints.pop().close()


def _claim_directory() -> str:
    """A directory that only this user can enter. Raises OSError if another user has made it."""
    path = os.path.join(tempfile.gettempdir(), f"qspec_gpus_{os.geteuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    return path
