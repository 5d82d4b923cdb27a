"""The devices: GPUs that this process sees, and those that the target's ranks hold.

NVML measures the GPUs. It needs no CUDA context.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

UNUSED = 0.05
"""Largest fraction of a GPU's memory in use that counts as unused."""


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


def visible_gpus() -> list[Gpu]:
    """All GPUs that this process sees; none if NVML does not answer, as in a MIG instance."""
    try:
        import pynvml  # SGLang requires it, but `qspec doctor` also reports that it is missing
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


def kind_of(args: Any) -> str:
    """The kind of the target's device, such as `cpu` or `cuda`, in SGLang's server arguments."""
    return str(args.device).split(":")[0]


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
