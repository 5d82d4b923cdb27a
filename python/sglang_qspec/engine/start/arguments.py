"""Adds QSPEC's flags to SGLang's parser, checks the settings, and sets defaults of SGLang.

The process that starts a server calls `add_flags` when it builds the parser and `read_flags` after
parsing. When SGLang resolves its arguments, it calls `resolve_memory` and then `resolve`. `resolve`
runs `check`, and then SGLang's own resolution, which calls `apply_defaults`. A QSpecError stops the
start.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

from sglang_qspec import config
from sglang_qspec.config import MAX_DRAFT_TOKENS, QSpecConfig, flag
from sglang_qspec.engine.boundary import compat, installed, refusal
from sglang_qspec.engine.placement import processes as process_placement
from sglang_qspec.engine.placement.processes import Placement
from sglang_qspec.engine.sidecar import model_pair
from sglang_qspec.engine.start import families, lora, unsupported
from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.sidecar import marlin as kernels

logger = logging.getLogger(__name__)

DRAFT_TOKENS = {"cpu": 16, "cuda": 8}
"""Default of --speculative-num-draft-tokens by device, including the root: the maximum width of a
pass."""

RUNNING_REQUESTS = 48
"""Default of --max-running-requests, as SGLang has it for NGRAM. `policy.PASS_ROWS` bounds the rows
of a pass, so wide passes need no lower default."""

OVERLAPS = {"cuda"}
"""Devices on which SGLang's overlap scheduler stays on. On a CPU the host itself runs the passes,
so nothing could overlap."""


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: add a flag for each setting of QSPEC."""
    group = parser.add_argument_group("QSPEC speculative decoding (sglang-qspec)")
    for field in config.fields():
        name, default = field.name, field.default
        if isinstance(default, bool):
            group.add_argument(
                config.flag(name),
                action="store_const",
                const=str(not default).lower(),
                help=field.metadata["help"],
            )
            continue
        shown = f" (default: {default})" if default != "" else ""
        group.add_argument(
            config.flag(name),
            type=_argument_type(name),
            metavar=type(default).__name__.upper(),
            help=field.metadata["help"] + shown,
        )


def _argument_type(name: str) -> Callable[[str], str]:
    def checked(text: str) -> str:
        try:
            config.parse(name, text, given_as=config.flag(name))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return checked


def read_flags(from_cli_args: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`: write the flags to the environment, for all processes."""
    refusal.note_command_line()
    given = {
        field.name: text
        for field in config.fields()
        if (text := getattr(args, "speculative_qspec_" + field.name, None)) is not None
    }
    algorithm = getattr(args, "speculative_algorithm", None) or ""
    if given and algorithm.upper() != "QSPEC":
        refusal.refuse(
            ConfigError(
                f"{config.flag(next(iter(given)))} is given, but --speculative-algorithm is "
                f"{algorithm or 'not set'}: it must be QSPEC"
            )
        )
    config.to_environment(given)
    return from_cli_args(cls, args)


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's `handle_speculative_decoding`: check the settings before SGLang uses them."""
    view = resolving_view(server_args)
    if config.is_qspec(view):
        try:
            settings = check(view)
            _check_target(view, model_config_of(server_args), settings)
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
    process_placement.write(None)
    view = resolving_view(server_args)
    if not config.is_qspec(view):
        previous(server_args)
        return
    try:
        families.check("--model-path", view.model_path, model_config_of(server_args))
    except QSpecError as error:
        refusal.refuse(error)
    given = view.mem_fraction_static is not None
    if view.max_running_requests is None:
        declare_resolution(server_args, "qspec", max_running_requests=RUNNING_REQUESTS)
    previous(server_args)
    try:
        fraction = _reserve(view, config.from_environment(), given=given)
    except QSpecError as error:
        refusal.refuse(error)
    else:
        if fraction != view.mem_fraction_static:
            declare_resolution(server_args, "qspec", mem_fraction_static=fraction)


def _reserve(view: Any, settings: QSpecConfig, *, given: bool) -> float:
    """Place the sidecar, and return the `mem_fraction_static` that leaves room for it."""
    from sglang_qspec.engine.placement import devices as placement

    fraction: float = view.mem_fraction_static
    path = view.speculative_draft_model_path
    if path is None or settings.endpoint or _kind(view) not in ("cpu", "cuda"):
        return fraction
    weights = placement.weight_bytes(path)
    decision = placement.decide(
        settings,
        on_cpu=_kind(view) == "cpu",
        held=placement.held_gpus(view),
        gpus=placement.visible_gpus(),
        weights=weights,
        claim=placement.claim,
    )
    placed = decision.placement
    if _kind(view) == placed.device == "cpu":
        placed = _divide(placed, settings, view.tp_size * view.dp_size)
    placement.check_sidecar(decision, weights)
    if view.dp_size > 1:
        placed = replace(placed, endpoint=placement.shared_endpoint())
    process_placement.write(placed)
    if not placed.shared:
        return fraction
    target = placement.weight_bytes(view.model_path)
    ranks = view.tp_size * view.pp_size
    left = placement.target_fraction(
        decision, fraction, None if target is None else target // ranks, given=given
    )
    logger.info(
        "The sidecar shares %s with the target and takes %g of its memory; the target's "
        "mem_fraction_static is %g.",
        placed.device,
        placed.mem_fraction,
        left,
    )
    return left


def _divide(placed: Placement, settings: QSpecConfig, ranks: int) -> Placement:
    """Divide the CPUs between a target of this number of ranks and its sidecar."""
    from sglang_qspec.engine.placement import core_division

    if core_division.pinned_cpus(settings):
        left = core_division.left_cpus(settings) if ranks == 1 else ""
        shares = core_division.shares_cpus(settings, ranks)
        if left:
            logger.info("The target leaves the CPUs %s to its sidecar.", left)
        elif shares:
            logger.warning(
                "The target also runs on CPUs of its sidecar (%s is %s), and each slows the other "
                "down: the target keeps its CPUs if OMP_NUM_THREADS or SGLANG_CPU_OMP_THREADS_BIND "
                "is set, if it has several ranks, or if it has no others.",
                flag("cores"),
                settings.cores,
            )
        return replace(placed, left=left, shares_cpus=shares)
    if settings.cores == config.AUTO_CORES and ranks > 1:
        pinned, shares = core_division.beside_ranks(ranks)
        return replace(placed, pinned=pinned, shares_cpus=shares)
    cores, shares = core_division.sidecar_cpus(settings), core_division.shares_cpus(settings)
    if settings.cores == config.AUTO_CORES and not cores:
        logger.info(
            "Target and sidecar share the CPUs: to divide them takes two cores or more, and "
            "neither OMP_NUM_THREADS nor SGLANG_CPU_OMP_THREADS_BIND."
        )
    return replace(placed, cores=cores, shares_cpus=shares)


def _kind(args: Any) -> str:
    return str(args.device).split(":")[0]


def check(args: Any) -> QSpecConfig:
    """Check all settings before any process starts or any weight loads.

    `args` is SGLang's resolving view of its server arguments. Raises QSpecError for settings that
    do not work with QSPEC.
    """
    from sglang_qspec.engine.passes.launch.tree_attention import verification_of

    compat.check_version()
    installed.check("front")
    settings = config.from_environment()
    if _kind(args) == "cpu":
        if not config.cpu_engine():
            raise ConfigError(
                f"--device is {args.device!r}, but SGLang serves on a CPU only if "
                f"{config.CPU_ENGINE} is 1 in the environment: set it"
            )
        verification_of(settings, "cpu", args.decode_attention_backend or args.attention_backend)
    unsupported.check(args)
    lora.check(args, settings)
    width = args.speculative_num_draft_tokens
    if width is not None and not 2 <= width <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {width}, but must be a whole number from 2 to "
            f"{MAX_DRAFT_TOKENS}"
        )
    for name in ("speculative_num_steps", "speculative_eagle_topk"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}, but QSPEC does not use it: "
                "leave it out, and set the width with --speculative-num-draft-tokens"
            )
    if settings.prefill_drafts == "on" and args.tp_size != 1:
        raise ConfigError(
            f"{config.flag('prefill_drafts')} is 'on', but must be 'off' with --tp-size "
            f"{args.tp_size}: only passes that decode verify drafts on several ranks"
        )
    if settings.key_file and not Path(settings.key_file).is_file():
        raise ConfigError(
            f"{config.flag('key_file')} is {settings.key_file!r}, but there is no such file"
        )
    _check_draft_model(args, settings)
    return settings


def _check_target(args: Any, model_config: Any, settings: QSpecConfig) -> None:
    """Let a target verify trees of one width if it needs to; raises ConfigError for `ragged`.

    A target with multimodal rotary positions (mRoPE) verifies trees of one width, because SGLang
    computes these positions for requests with equal numbers of tokens.
    """
    if model_config.model_is_mrope:
        if settings.verify == "ragged":
            raise ConfigError(
                f"{config.flag('verify')} is 'ragged', but {args.model_path} has multimodal rotary "
                "positions: it must be 'auto' or 'tree'"
            )
        config.to_environment({"verify": "tree"})


def _check_draft_model(args: Any, settings: QSpecConfig) -> None:
    """Check that the draft model exists and has the target's tokenizer."""
    path = args.speculative_draft_model_path
    if path is None:
        if not settings.endpoint:
            logger.info(
                "QSPEC runs without a draft model (--speculative-draft-model-path): drafts come "
                "from <NGRAMGUESS> tags, prompts and outputs only."
            )
        return
    if settings.endpoint:
        raise ConfigError(
            f"{config.flag('endpoint')} is {settings.endpoint!r} and "
            f"--speculative-draft-model-path is {path!r}: give one of them, since the sidecar at "
            "an endpoint brings its own draft model"
        )
    flag = "--speculative-draft-model-path"
    draft = model_pair.describe_given(
        flag, path, args.trust_remote_code, args.speculative_draft_model_revision
    )
    families.check_checkpoint(
        flag,
        path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
    )
    placed = process_placement.read()
    if placed is not None and placed.device != "cpu":
        quantization = getattr(args, "speculative_draft_model_quantization", None)
        kernels.check_checkpoint(Path(path).expanduser(), quantization=quantization)
    target = model_pair.describe_model(
        args.model_path, args.tokenizer_path, args.trust_remote_code, args.revision
    )
    if not args.skip_tokenizer_init and draft.fingerprint != target.fingerprint:
        objection = model_pair.tokenizer_objection(target, draft)
        raise ConfigError(f"{flag} is {path!r}, but {objection}")
    if draft.vocab_size != target.vocab_size:
        logger.info(
            "The target has %d token ids and the draft model %d; the sidecar drafts only ids that "
            "both have, for texts that consist of such ids.",
            target.vocab_size,
            draft.vocab_size,
        )


def apply_defaults(args: Any) -> None:
    """Set SGLang's arguments as for NGRAM: a width and no mixed chunks.

    `speculative_num_draft_tokens` is the maximum size of a tree, and SGLang reserves KV slots for
    it. `engine.cuda.backends` says how attention backends verify. The pipeline `halves` reads
    tokens in the middle of a round, so it needs a server without the overlap scheduler. Raises
    ConfigError if the attention backend cannot verify as the settings ask.
    """
    from sglang_qspec.engine.cuda import backends

    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = DRAFT_TOKENS[_kind(args)]
    args.speculative_num_steps = 1
    settings = config.from_environment()
    view = resolving_view(args)
    ragged = _kind(args) != "cpu" and backends.chooses_ragged(view, settings.verify)
    backends.prepare(args, ragged=ragged, chains=backends.takes_chains(view, model_config_of(args)))
    if _kind(args) not in OVERLAPS or settings.mode == "halves":
        args.disable_overlap_schedule = True
    args.enable_mixed_chunk = False
