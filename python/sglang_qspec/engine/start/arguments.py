"""QSPEC's steps in SGLang's resolution of its arguments: checks, memory and defaults.

When SGLang resolves its arguments, it calls `resolve_memory` and then `resolve`. `resolve` runs the
checks, and then SGLang's own resolution, which calls `apply_defaults`. A QSpecError stops the
start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

from sglang_qspec import config
from sglang_qspec.engine.boundary import refusal
from sglang_qspec.engine.placement import environment, sidecar
from sglang_qspec.engine.placement.devices import kind_of
from sglang_qspec.engine.start import checks, families
from sglang_qspec.errors import QSpecError

DRAFT_TOKENS = {"cpu": 16, "cuda": 8}
"""Default of --speculative-num-draft-tokens by device, including the root: the maximum width of a
pass."""

RUNNING_REQUESTS = {"cpu": 48}
"""Default of --max-running-requests by device. More rows make a pass on a CPU longer, so more
running requests would give no more tokens per second, and requests that wait get drafts. On a GPU
SGLang's own limit holds: the memory of the KV. `policy.PASS_ROWS` bounds the rows of a pass, so
wide passes need no lower limit."""

OVERLAPS = {"cuda"}
"""Devices on which SGLang's overlap scheduler stays on. On a CPU the host itself runs the passes,
so nothing could overlap."""


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's `handle_speculative_decoding`: check the settings before SGLang uses them."""
    view = resolving_view(server_args)
    if config.is_qspec(view):
        try:
            settings = checks.check(view)
            checks.check_target(view, model_config_of(server_args), settings)
        except QSpecError as error:
            refusal.refuse(error)
    try:
        previous(server_args)
    except QSpecError as error:
        refusal.refuse(error)


def resolve_memory(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's `handle_gpu_memory_settings`: place the sidecar and reserve its memory.

    This step comes before SGLang's checks of model families, which end a start with a traceback,
    so QSPEC refuses families here. SGLang derives the sizes of its CUDA graphs from
    `max_running_requests`, which therefore gets its default first. If the sidecar shares the
    target's GPU, `mem_fraction_static` is lowered by the sidecar's share. SGLang sizes KV in two
    ways, and both read `mem_fraction_static`.
    """
    environment.write(None)
    view = resolving_view(server_args)
    if not config.is_qspec(view):
        previous(server_args)
        return
    try:
        families.check("--model-path", view.model_path, model_config_of(server_args))
    except QSpecError as error:
        refusal.refuse(error)
    given = view.mem_fraction_static is not None
    most = RUNNING_REQUESTS.get(kind_of(view))
    if view.max_running_requests is None and most is not None:
        declare_resolution(server_args, "qspec", max_running_requests=most)
    previous(server_args)
    try:
        fraction = sidecar.reserve(view, config.from_environment(), given=given)
    except QSpecError as error:
        refusal.refuse(error)
    else:
        if fraction != view.mem_fraction_static:
            declare_resolution(server_args, "qspec", mem_fraction_static=fraction)


def apply_defaults(args: Any) -> None:
    """Set SGLang's arguments as for NGRAM: a width and no mixed chunks.

    `speculative_num_draft_tokens` is the maximum size of a tree, and SGLang reserves KV slots for
    it. `engine.cuda.backends` says how attention backends verify. The pipeline `halves` reads
    tokens in the middle of a round, so it needs a server without the overlap scheduler. Raises
    ConfigError if the attention backend cannot verify as the settings ask.
    """
    # Every process of a server loads this module, and only the first one reads the arguments.
    from sglang_qspec.engine.cuda import backends

    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = DRAFT_TOKENS[kind_of(args)]
    args.speculative_num_steps = 1
    settings = config.from_environment()
    view = resolving_view(args)
    ragged = kind_of(args) != "cpu" and backends.chooses_ragged(view, settings.verify)
    backends.prepare(args, ragged=ragged, chains=backends.takes_chains(view, model_config_of(args)))
    if kind_of(args) not in OVERLAPS or settings.mode == "halves":
        args.disable_overlap_schedule = True
    args.enable_mixed_chunk = False
