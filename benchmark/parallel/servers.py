"""The three servers: without speculation on the target's cores and on all, and with a sidecar."""

from __future__ import annotations

from benchmark.harness.configuration import Configuration, Settings
from benchmark.parallel.plan import BASELINE, BASELINE_ALL_CORES

SPECULATING = "qspec"
MEM_FRACTION = "0.05"
"""Of the draft device's memory; several servers wait in it at once."""


def server_for(config: str, settings: Settings, width: int) -> Configuration:
    """What serves the configuration `config`, one of plan.NAMES.

    All pipelines share a server, and so the very same sidecar; `width` is the widest pass that it
    can be set to, in tokens of a request.
    """
    both = (*settings.target_cores, *settings.sidecar_cores)
    if config == BASELINE:
        return Configuration(config, settings, (), settings.target_cores)
    if config == BASELINE_ALL_CORES:
        return Configuration(config, settings, (), both)
    speculation = ["--speculative-algorithm", "QSPEC"]
    speculation += ["--speculative-draft-model-path", str(settings.draft_model)]
    speculation += ["--speculative-num-draft-tokens", str(width)]
    if settings.on_gpu:
        speculation += ["--speculative-qspec-draft-device", "cuda:0"]
    else:
        speculation += ["--speculative-qspec-mem-fraction", MEM_FRACTION]
    if settings.sidecar_cores:
        cores = ",".join(map(str, settings.sidecar_cores))
        speculation += ["--speculative-qspec-cores", cores]
    return Configuration(SPECULATING, settings, tuple(speculation), settings.target_cores)
