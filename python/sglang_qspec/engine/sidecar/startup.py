"""Opens the links to the sidecars, and starts the server's own sidecar."""

from __future__ import annotations

import atexit
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sglang.srt.runtime_context import get_model, get_parallel, get_serving, get_spec

from sglang_qspec.config import SHARED_FRACTION, QSpecConfig, flag, visible_gpus
from sglang_qspec.engine.placement import core_division, environment
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.engine.sidecar import model_pair, scheduler_fork
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.errors import LinkError
from sglang_qspec.heads.config import digest, folder_of, is_head_folder
from sglang_qspec.link import (
    LinkState,
    PrivateEndpoint,
    SidecarLink,
    keys,
    sweep_abandoned,
)
from sglang_qspec.messages import PROTOCOL, Hello
from sglang_qspec.sidecar.child_process import SidecarProcess

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Seconds that the start waits for answers from the sidecars at the endpoints. A refusal stops the
start."""


def open_links(settings: QSpecConfig, gpu_id: int) -> Opened:
    """Open the links, and start a sidecar if the server has a draft model of its own.

    There is no link if the server has neither a draft model nor an endpoint. Raises LinkError if
    the sidecar at an endpoint refuses this target. An absent sidecar is no error: the link keeps
    trying, and the server serves requests without its drafts.
    """
    try:
        return _open(settings, gpu_id)
    finally:
        scheduler_fork.discard()  # what the first scheduler of several has not taken


def _open(settings: QSpecConfig, gpu_id: int) -> Opened:
    if settings.endpoints:
        hello = _hello(None, settings.head_path)
        connect = functools.partial(_connect, hello=hello, key_file=settings.key_file)
        given = {"of_head": bool(hello.head), "has_model": not hello.head}
        return Opened(_join(settings.endpoints, connect), None, connect, **given)
    draft_model = get_spec().speculative_draft_model_path
    if draft_model is None:
        return Opened()
    hello = _hello(draft_model, settings.head_path)
    return _start_own(settings, draft_model, hello, gpu_id)


def _connect(endpoint: str, hello: Hello, key_file: str) -> SidecarLink:
    """Begin to connect to an endpoint. Raises LinkError if the endpoint is not allowed."""
    return SidecarLink(endpoint, hello, keys.load_for(endpoint, key_file))


def _hello(draft_model: str | None, head_path: str) -> Hello:
    """What the server tells its sidecars; one of the two may be a head. Raises ConfigError."""
    model = get_model()
    tokenizer_path = get_serving().tokenizer_path or model.model_path
    target = model_pair.describe_model(
        model.model_path, tokenizer_path, model.trust_remote_code, model.revision
    )
    head = digest(folder_of(draft_model, head_path))
    return Hello(PROTOCOL, target.vocab_size, target.fingerprint, head=head)


def _join(endpoints: Sequence[str], connect: Callable[[str], SidecarLink]) -> Sequence[SidecarLink]:
    """Connect to sidecars that someone else runs, and wait for their answers."""
    links = [connect(endpoint) for endpoint in endpoints]
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while time.monotonic() < deadline:
        for link in links:
            link.receive()
        if all(link.state is not LinkState.CONNECTING for link in links):
            break
        time.sleep(0.02)
    for link in links:
        if link.state is LinkState.REFUSED:
            raise LinkError(
                f"{flag('endpoint')} has {link.endpoint!r}, but its sidecar refuses this server: "
                f"{link.refusal}"
            )
        if link.state is not LinkState.READY:
            logger.warning(
                "No sidecar answers at %s; the server runs without its drafts until one answers.",
                link.endpoint,
            )
    return links


def _start_own(settings: QSpecConfig, draft_model: str, hello: Hello, gpu_id: int) -> Opened:
    """Start a sidecar as a child of this process, and connect to it.

    Of several schedulers the first one starts the sidecar, and the others only connect. A sidecar
    on the target's GPU starts in `SidecarPool.start_waiting`, once the target has sized its KV.
    Otherwise the size of the target's KV would depend on how far the sidecar's start has come.
    """
    placed = environment.read() or _default_placement(settings, gpu_id)
    has_model = not is_head_folder(Path(draft_model).expanduser())
    of_head = bool(settings.head_path) or not has_model
    if placed.endpoint and get_parallel().dp_rank:
        link = SidecarLink(placed.endpoint, hello)
        return Opened((link,), of_head=of_head, has_model=has_model)
    sweep_abandoned()
    endpoint = placed.endpoint or _own_endpoint()
    spec = get_spec()
    explicit = spec._speculative_draft_quantization_explicitly_set
    process = SidecarProcess(
        settings,
        model_path=draft_model,
        quantization=spec.speculative_draft_model_quantization if explicit else None,
        endpoint=endpoint,
        device=placed.device,
        mem_fraction=placed.mem_fraction,
        visible=placed.visible,
        revision=spec.speculative_draft_model_revision,
        attention_backend=spec.speculative_draft_attention_backend,
        trust_remote_code=get_model().trust_remote_code,
        cores=placed.cores or placed.pinned or core_division.pinned_cpus(settings),
        background=bool(placed.cores),
        shared=bool(placed.endpoint),
        target_path=get_model().model_path if of_head else "",
        fork_server=scheduler_fork.take(),
    )
    if not placed.shared:
        process.start()
    atexit.register(process.stop)
    link = SidecarLink(endpoint, hello)
    return Opened((link,), process, waits=placed.shared, of_head=of_head, has_model=has_model)


def _own_endpoint() -> str:
    """A new private address, which is removed when this process ends."""
    private = PrivateEndpoint()
    atexit.register(private.close)
    return private.address


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
