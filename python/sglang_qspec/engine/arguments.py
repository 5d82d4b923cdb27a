"""Adds QSPEC's flags to SGLang's parser, checks the settings, and sets defaults of SGLang.

The process that starts a server calls `add_flags` when it builds the parser and `read_flags` after
parsing. When SGLang resolves its arguments, it calls `resolve_memory` and then `resolve`. `resolve`
runs `check`, and then SGLang's own resolution, which calls `apply_defaults`. A QSpecError stops the
start.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import (
    attn_dp_enabled_of,
    declare_resolution,
    resolving_view,
)
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.environ import envs

from sglang_qspec import config
from sglang_qspec.config import MAX_DRAFT_TOKENS, QSpecConfig
from sglang_qspec.engine import compat, hooks
from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.models import kernels

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

_started_from_command_line = False


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
    global _started_from_command_line
    _started_from_command_line = True
    given = {
        field.name: text
        for field in config.fields()
        if (text := getattr(args, "speculative_qspec_" + field.name, None)) is not None
    }
    algorithm = getattr(args, "speculative_algorithm", None) or ""
    if given and algorithm.upper() != "QSPEC":
        _stop(
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
    if (view.speculative_algorithm or "").upper() == "QSPEC":
        try:
            settings = check(view)
            _check_target(view, model_config_of(server_args), settings)
        except QSpecError as error:
            _stop(error)
    try:
        previous(server_args)
    except QSpecError as error:
        _stop(error)


def resolve_memory(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around SGLang's `handle_gpu_memory_settings`: place the sidecar and reserve its memory.

    SGLang derives the sizes of its CUDA graphs from `max_running_requests`, which therefore gets
    its default first. If the sidecar shares the target's GPU, `mem_fraction_static` is lowered by
    the sidecar's share. SGLang sizes KV in two ways, and both read `mem_fraction_static`.
    """
    config.place(None)
    view = resolving_view(server_args)
    if (view.speculative_algorithm or "").upper() != "QSPEC":
        previous(server_args)
        return
    given = view.mem_fraction_static is not None
    if view.max_running_requests is None:
        declare_resolution(server_args, "qspec", max_running_requests=RUNNING_REQUESTS)
    previous(server_args)
    try:
        fraction = _reserve(view, config.from_environment(), given=given)
    except QSpecError as error:
        _stop(error)
    else:
        if fraction != view.mem_fraction_static:
            declare_resolution(server_args, "qspec", mem_fraction_static=fraction)


def _reserve(view: Any, settings: QSpecConfig, *, given: bool) -> float:
    """Place the sidecar, and return the `mem_fraction_static` that leaves room for it."""
    from sglang_qspec.engine.sidecar import core_division, placement

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
        cores, shares = core_division.sidecar_cpus(settings), core_division.shares_cpus(settings)
        placed = replace(placed, cores=cores, shares_cpus=shares)
        if settings.cores == config.AUTO_CORES and not cores:
            logger.info(
                "Target and sidecar share the CPUs: to divide them takes two cores or more, and "
                "neither OMP_NUM_THREADS nor SGLANG_CPU_OMP_THREADS_BIND."
            )
    placement.check_sidecar(decision, weights)
    config.place(placed)
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


def _kind(args: Any) -> str:
    return str(args.device).split(":")[0]


def _stop(error: QSpecError) -> None:
    """Raise the error for a caller of `sgl.Engine`; on a command line print only its message."""
    if _started_from_command_line:
        sys.stderr.write(f"sglang-qspec: error: {error}\n")
        raise SystemExit(2)
    raise error


def check(args: Any) -> QSpecConfig:
    """Check all settings before any process starts or any weight loads.

    `args` is SGLang's resolving view of its server arguments. Raises QSpecError for settings that
    do not work with QSPEC.
    """
    from sglang_qspec.engine.passes.tree_attention import verification_of

    compat.check_version()
    compat.check_hooks(hooks.front())
    settings = config.from_environment()
    if _kind(args) == "cpu":
        verification_of(settings, "cpu", args.decode_attention_backend or args.attention_backend)
    for refused, name, value, allowed in _unsupported(args):
        if refused:
            raise ConfigError(f"{name} is {value}, but QSPEC supports only {allowed}")
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
    if settings.key_file and not Path(settings.key_file).is_file():
        raise ConfigError(
            f"{config.flag('key_file')} is {settings.key_file!r}, but there is no such file"
        )
    _check_draft_model(args, settings)
    return settings


def _unsupported(args: Any) -> list[tuple[bool, str, object, str]]:
    """(refused, setting, value, allowed) for each setting of SGLang that QSPEC restricts."""
    device = _kind(args)
    return [
        (device not in ("cpu", "cuda"), "--device", args.device, "cpu and cuda"),
        (args.tp_size != 1, "--tp-size", args.tp_size, "1"),
        (args.pp_size != 1, "--pp-size", args.pp_size, "1"),
        (args.dp_size != 1, "--dp-size", args.dp_size, "1"),
        (attn_dp_enabled_of(args), "--attn-dp-size", args.attn_dp_size, "1"),
        (
            args.disaggregation_mode != "null",
            "--disaggregation-mode",
            args.disaggregation_mode,
            "null",
        ),
        (
            args.page_size not in (None, 1) and args.attention_backend != "flashinfer",
            "--page-size",
            args.page_size,
            "1 (or a larger page with --attention-backend flashinfer)",
        ),
        (args.tokenizer_worker_num != 1, "--tokenizer-worker-num", args.tokenizer_worker_num, "1"),
        # SGLang's Rust server bypasses the hooks that check requests and read guesses.
        (
            bool(envs.SGLANG_RUST_SERVER.get()),
            "SGLANG_RUST_SERVER",
            envs.SGLANG_RUST_SERVER.get(),
            "false",
        ),
        (bool(args.enable_lora), "--enable-lora", args.enable_lora, "models without LoRA adapters"),
        (bool(args.is_embedding), "--is-embedding", args.is_embedding, "generation"),
        (bool(args.enable_pdmux), "--enable-pdmux", args.enable_pdmux, "false"),
        (
            bool(args.speculative_adaptive),
            "--speculative-adaptive",
            args.speculative_adaptive,
            "false",
        ),
        # Below 1 the target would accept draft tokens that it did not choose.
        *(
            (getattr(args, name) != 1.0, "--" + name.replace("_", "-"), getattr(args, name), "1.0")
            for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        ),
        (
            bool(args.enable_mixed_chunk),
            "--enable-mixed-chunk",
            args.enable_mixed_chunk,
            "false",
        ),
        (
            device == "cpu" and bool(args.enable_torch_compile),
            "--enable-torch-compile",
            args.enable_torch_compile,
            "false on a cpu",
        ),
    ]


def _check_target(args: Any, model_config: Any, settings: QSpecConfig) -> None:
    """Refuse a target that QSPEC cannot verify.

    A target with multimodal rotary positions (mRoPE) verifies trees of one width, because SGLang
    computes these positions for requests with equal numbers of tokens.
    """
    check_family("--model-path", args.model_path, model_config)
    if model_config.model_is_mrope:
        if settings.verify == "ragged":
            raise ConfigError(
                f"{config.flag('verify')} is 'ragged', but {args.model_path} has multimodal rotary "
                "positions: it must be 'auto' or 'tree'"
            )
        config.to_environment({"verify": "tree"})


def check_family(given_as: str, path: str, model_config: Any) -> None:
    """Refuse a model with recurrent state, from which a rejected draft token cannot be removed.

    `model_config` is SGLang's ModelConfig. Raises ConfigError.
    """
    if mambaish_config(model_config) is not None:
        raise ConfigError(
            f"{given_as} is {path}, a model with recurrent layers (Mamba or linear attention), but "
            "QSPEC supports only attention"
        )


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
    draft = compat.describe_given(
        flag, path, args.trust_remote_code, args.speculative_draft_model_revision
    )
    placed = config.placement()
    if placed is not None and placed.device != "cpu":
        quantization = getattr(args, "speculative_draft_model_quantization", None)
        kernels.check_checkpoint(Path(path).expanduser(), quantization=quantization)
    target = compat.describe_model(
        args.model_path, args.tokenizer_path, args.trust_remote_code, args.revision
    )
    if not args.skip_tokenizer_init and draft.fingerprint != target.fingerprint:
        objection = compat.tokenizer_objection(target, draft)
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
    ragged = _kind(args) != "cpu" and backends.chooses_ragged(resolving_view(args), settings.verify)
    backends.prepare(args, ragged=ragged)
    if _kind(args) not in OVERLAPS or settings.mode == "halves":
        args.disable_overlap_schedule = True
    args.enable_mixed_chunk = False
