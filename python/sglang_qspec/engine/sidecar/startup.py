"""Opens the link to the sidecar, and starts the server's own sidecar."""

from __future__ import annotations

import atexit
import logging
import time
from typing import Any

import torch
from sglang.srt.runtime_context import get_model, get_serving, get_spec

from sglang_qspec.config import (
    SHARED_FRACTION,
    Placement,
    QSpecConfig,
    flag,
    placement,
    visible_gpus,
)
from sglang_qspec.engine import compat
from sglang_qspec.engine.sidecar import core_division
from sglang_qspec.errors import LinkError
from sglang_qspec.link import (
    Keys,
    LinkState,
    SidecarLink,
    keys,
    private_endpoint,
    sweep_abandoned,
)
from sglang_qspec.messages import PROTOCOL, Hello
from sglang_qspec.sidecar.child_process import SidecarProcess

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Seconds that the start waits for an answer from the sidecar at an endpoint. A refusal stops the
start."""


def open_link(
    settings: QSpecConfig, gpu_id: int
) -> tuple[SidecarLink | None, SidecarProcess | None]:
    """Open the link, and start a sidecar if the server has a draft model of its own.

    The link is None if the server has neither a draft model nor an endpoint. The process is None
    unless this server started it. Raises LinkError if the sidecar at the endpoint refuses this
    target. An absent sidecar is no error: the link keeps trying, and the server serves requests
    without its drafts.
    """
    if settings.endpoint:
        hello = _hello()
        key_pair = keys.load(settings.key_file) if settings.key_file else None
        return _join(settings.endpoint, hello, key_pair), None
    draft_model = get_spec().speculative_draft_model_path
    if draft_model is None:
        return None, None
    return _start_own(settings, draft_model, _hello(), gpu_id)


def _hello() -> Hello:
    model = get_model()
    tokenizer_path = get_serving().tokenizer_path or model.model_path
    target = compat.describe_model(
        model.model_path, tokenizer_path, model.trust_remote_code, model.revision
    )
    return Hello(PROTOCOL, target.vocab_size, target.fingerprint)


def _join(endpoint: str, hello: Hello, key_pair: Keys | None) -> SidecarLink:
    """Connect to a sidecar that someone else runs, and wait for its answer."""
    link = SidecarLink(endpoint, hello, key_pair)
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while link.state is LinkState.CONNECTING and time.monotonic() < deadline:
        link.receive()
        time.sleep(0.02)
    if link.state is LinkState.REFUSED:
        raise LinkError(
            f"{flag('endpoint')} is {endpoint!r}; its sidecar refuses this server: {link.refusal}"
        )
    if link.state is not LinkState.READY:
        logger.warning(
            "No sidecar answers at %s; the server runs without its drafts until one answers.",
            endpoint,
        )
    return link


def _start_own(
    settings: QSpecConfig, draft_model: str, hello: Hello, gpu_id: int
) -> tuple[SidecarLink, SidecarProcess]:
    """Start a sidecar as a child of this process.

    A sidecar on the target's GPU starts in `start_waiting`, once the target has sized its KV.
    Otherwise the size of the target's KV would depend on how far the sidecar's start has come.
    """
    global _waiting
    sweep_abandoned()
    private = private_endpoint()
    spec = get_spec()
    explicit = spec._speculative_draft_quantization_explicitly_set
    placed = placement() or _default_placement(settings, gpu_id)
    process = SidecarProcess(
        settings,
        model_path=draft_model,
        quantization=spec.speculative_draft_model_quantization if explicit else None,
        endpoint=private.address,
        device=placed.device,
        mem_fraction=placed.mem_fraction,
        visible=placed.visible,
        revision=spec.speculative_draft_model_revision,
        attention_backend=spec.speculative_draft_attention_backend,
        trust_remote_code=get_model().trust_remote_code,
        cores=placed.cores or core_division.pinned_cpus(settings),
        background=bool(placed.cores),
    )
    if placed.shared:
        _waiting = process
    else:
        process.start()
    atexit.register(private.close)
    atexit.register(process.stop)
    return SidecarLink(private.address, hello), process


_waiting: SidecarProcess | None = None
"""A sidecar that shares the target's GPU and has not started yet."""


def start_waiting(result: None, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.init_model_worker`: start the sidecar that waited for the target's KV."""
    global _waiting
    process, _waiting = _waiting, None
    if process is not None:
        process.start()


def _default_placement(settings: QSpecConfig, gpu_id: int) -> Placement:
    """The placement in a process that has not resolved SGLang's arguments, as in some tools."""
    shared = f"cuda:{gpu_id}" if torch.cuda.is_available() else "cpu"
    device = settings.draft_device or shared
    return Placement(
        device,
        device == shared != "cpu",
        settings.mem_fraction or SHARED_FRACTION,
        visible_gpus(),
    )
