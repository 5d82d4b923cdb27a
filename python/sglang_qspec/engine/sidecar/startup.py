"""Opens the link to the sidecar, and starts the server's own sidecar."""

from __future__ import annotations

import atexit
import logging
import time

import torch
from sglang.srt.runtime_context import get_model, get_serving, get_spec

from sglang_qspec.config import QSpecConfig, flag
from sglang_qspec.engine import compat
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
from sglang_qspec.sidecar.process import SidecarProcess

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Seconds that the start waits for the sidecar at an endpoint, whose refusal stops the start."""


def open_link(
    settings: QSpecConfig, gpu_id: int
) -> tuple[SidecarLink | None, SidecarProcess | None]:
    """Open the link, and start a sidecar if the server has a draft model of its own.

    Returns no link without a draft model and an endpoint, and no process unless this server started
    one. Raises LinkError if the sidecar at the endpoint refuses this target. An absent sidecar is
    no error: the link keeps trying, and the server serves requests without its drafts.
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
    """Start a sidecar as a child of this process; it loads its weights while the target does."""
    sweep_abandoned()
    private = private_endpoint()
    spec = get_spec()
    explicit = spec._speculative_draft_quantization_explicitly_set
    process = SidecarProcess(
        settings,
        model_path=draft_model,
        quantization=spec.speculative_draft_model_quantization if explicit else None,
        endpoint=private.address,
        device=settings.draft_device or _default_device(gpu_id),
        revision=spec.speculative_draft_model_revision,
        trust_remote_code=get_model().trust_remote_code,
    )
    process.start()
    atexit.register(private.close)
    atexit.register(process.stop)
    return SidecarLink(private.address, hello), process


def _default_device(gpu_id: int) -> str:
    """The last GPU, so that with two GPUs each model has one; `cpu` without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    last = torch.cuda.device_count() - 1
    return f"cuda:{last if last != gpu_id else gpu_id}"
