"""Loads the draft model and serves it to the servers until a signal."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from functools import partial
from pathlib import Path

import psutil
import torch

from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.config import HeadKind, digest, folder_of, is_head_folder, read
from sglang_qspec.link import LinkServer, keys, remove_private
from sglang_qspec.messages import PROTOCOL, Welcome
from sglang_qspec.sidecar import hardware
from sglang_qspec.sidecar.burst import MOST_BURSTS, MOST_PASSES
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.figures import Parts, heartbeat
from sglang_qspec.sidecar.guesser import Guesser, OwnHead
from sglang_qspec.sidecar.head_drafter import HeadDrafter
from sglang_qspec.sidecar.head_model import HeadModel
from sglang_qspec.sidecar.head_runner import KV_SLOTS, HeadOptions, HeadRunner
from sglang_qspec.sidecar.hydra_model import HydraModel, ReadyHydra
from sglang_qspec.sidecar.loading import DraftModelOptions
from sglang_qspec.sidecar.loop import serve
from sglang_qspec.sidecar.medusa_model import MedusaModel
from sglang_qspec.sidecar.pair_drafter import PairDrafter
from sglang_qspec.sidecar.pass_statistics import PassStatistics
from sglang_qspec.sidecar.stopping import stop_signal

logger = logging.getLogger("sglang_qspec.sidecar")


def run(options: argparse.Namespace, kind: str | None, *, yields: bool) -> int:
    """Load the draft model on a device of this kind, and serve until a signal; returns 0.

    With `yields` or --background the process lowers its priority once the model is loaded.
    """
    began = time.monotonic()
    key_pair = keys.load_for(options.endpoint, options.key_file)
    metrics = None
    if options.metrics_port:
        from sglang_qspec.sidecar.metrics import SidecarMetrics  # needs an optional package

        metrics = SidecarMetrics(options.metrics_host, options.metrics_port)
    model, drafter = _models(options, kind)
    stopping = stop_signal()
    drafter.warm_up()
    model.report_memory()
    server = LinkServer(
        options.endpoint,
        _welcome(options, model),
        model.fingerprint(),
        lambda: heartbeat(parts),
        key_pair,
        head=digest(folder_of(options.model_path, options.head_path)),
    )
    parts = Parts(drafter, model.rows, server)
    logger.info(
        "loaded %s (%s, %s) on %s with %d KV slots in %.0f ms; listening at %s",
        model.name,
        model.quantization or "not quantized",
        model.dtype,
        model.device,
        model.rows.total_slots,
        (time.monotonic() - began) * 1e3,
        server.endpoint,
    )
    if options.background or yields:  # only now, because loading needs CPU time to end
        hardware.lower_priority(idle=options.background)
    try:
        publish = None if metrics is None else partial(metrics.publish, parts)
        serve(drafter, server, stopping.is_set, publish)
    finally:
        server.close()
        _clear_socket(server.endpoint, options.parent_pid)
        model.unload()
    logger.info("stopped after %d drafted tokens", drafter.statistics.drafted_tokens)
    return 0


def _models(
    options: argparse.Namespace, kind: str | None
) -> tuple[DraftModel | HeadRunner, Drafter | HeadDrafter | PairDrafter]:
    """Load a draft model, a head or both on a device of this kind; None lets SGLang choose.

    Of both the draft model is returned. Raises ConfigError for what a head does not support.
    """
    folder = Path(options.model_path).expanduser()
    if is_head_folder(folder):
        if not options.target_path:
            raise ConfigError(
                f"--model-path is {options.model_path!r}, a head, so --target-path must be the "
                "folder of its target"
            )
        if options.draft_model_head:
            raise ConfigError(
                f"--draft-model-head is {options.draft_model_head!r}, but --model-path is the head "
                f"{options.model_path}: it must be a draft model"
            )
        return _head(options, folder, kind, PassStatistics())
    model, drafter = _draft_model(options, kind)
    if not options.head_path:
        return model, drafter
    folder = Path(options.head_path).expanduser()
    _, head = _head(options, folder, kind, drafter.statistics)
    return model, PairDrafter(drafter, head)


def _head(
    options: argparse.Namespace, folder: Path, kind: str | None, statistics: PassStatistics
) -> tuple[HeadRunner, HeadDrafter]:
    """Load the head in a folder."""
    given = HeadOptions(
        folder,
        Path(options.target_path).expanduser(),
        device=kind or ("cuda" if torch.cuda.is_available() else "cpu"),
        context_len=options.context_length,
        kv_slots=options.max_total_tokens or KV_SLOTS,
        batch=options.slots or None,
        trust_remote_code=options.trust_remote_code,
    )
    runners = {HeadKind.MEDUSA: MedusaModel, HeadKind.HYDRA: HydraModel}
    model = runners.get(read(folder).kind, HeadModel)(given)
    most = options.max_server_tokens
    return model, HeadDrafter(model, statistics=statistics, max_server_tokens=most)


def _draft_model(options: argparse.Namespace, kind: str | None) -> tuple[DraftModel, Drafter]:
    """Load a draft model on a device of this kind; None lets SGLang choose."""
    own_head = _own_head(options, kind)
    model = DraftModel(
        DraftModelOptions(
            model_path=options.model_path,
            revision=options.revision,
            quantization=options.quantization,
            dtype=options.dtype,
            device=kind,
            mem_fraction=options.mem_fraction or None,
            max_total_tokens=options.max_total_tokens,
            context_len=options.context_length,
            batch=options.slots or None,
            prefill_tokens=options.prefill_tokens,
            attention_backend=options.attention_backend,
            trust_remote_code=options.trust_remote_code,
        ),
        keeps_states=own_head is not None,
    )
    on_cpu = model.device.startswith("cpu")
    drafter = Drafter(
        model,
        slots=model.slots,
        max_completion_tokens=options.max_completion_tokens,
        prefill_tokens=model.prefill_tokens,
        apart=on_cpu,
        share=options.share_between_servers,
        steps=not options.head_path,
        max_server_tokens=options.max_server_tokens,
        max_backlog_s=options.max_backlog,
        most_passes=1 if on_cpu else MOST_PASSES,
        most_bursts=1 if on_cpu else MOST_BURSTS,
        guesser=None if own_head is None else Guesser(own_head),
    )
    return model, drafter


def _own_head(options: argparse.Namespace, kind: str | None) -> OwnHead | None:
    """Load the draft model's own head; None without one. Raises ConfigError."""
    if not options.draft_model_head:
        return None
    given = f"--draft-model-head is {options.draft_model_head!r}"
    if kind != "cpu":
        raise ConfigError(f"{given}, but a draft model has a head on a CPU alone (--device cpu)")
    folder = Path(options.draft_model_head).expanduser()
    if read(folder).kind is not HeadKind.HYDRA:
        raise ConfigError(f"{given}, but must be the folder of a Hydra head")
    model = Path(options.model_path).expanduser()
    return OwnHead(ReadyHydra(folder, model, torch.device("cpu")))


def _welcome(options: argparse.Namespace, model: DraftModel | HeadRunner) -> Welcome:
    """The answer to a server's Hello."""
    return Welcome(
        PROTOCOL,
        model.name,
        model.vocab_size,
        model.rows.context_len,
        # The other half is for the outputs that follow these texts.
        max_text_tokens=options.max_server_tokens // 2,
    )


def _clear_socket(endpoint: str, parent_pid: int | None) -> None:
    """Remove the socket file, which ZMQ leaves behind, and the directory of a killed server."""
    if endpoint.startswith("ipc://"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(endpoint.removeprefix("ipc://"))
        if parent_pid is not None and not _has_ancestor(parent_pid):
            remove_private(endpoint)


def _has_ancestor(pid: int) -> bool:
    """Whether `pid` is the parent of this process, or that of its fork server."""
    return pid in [each.pid for each in psutil.Process().parents()[:2]]
