"""Checks all settings before any process starts or any weight loads.

A check raises QSpecError for settings that do not work with QSPEC.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang_qspec import config
from sglang_qspec.config import MAX_DRAFT_TOKENS, QSpecConfig
from sglang_qspec.engine.boundary import compat, installed
from sglang_qspec.engine.placement import environment
from sglang_qspec.engine.placement.devices import kind_of
from sglang_qspec.engine.sidecar import model_pair
from sglang_qspec.engine.start import families, heads, lora, unsupported
from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.config import is_head_folder
from sglang_qspec.sidecar import marlin as kernels

logger = logging.getLogger(__name__)


def check(args: Any) -> QSpecConfig:
    """Check all settings before any process starts or any weight loads.

    `args` is SGLang's resolving view of its server arguments. Raises QSpecError for settings that
    do not work with QSPEC.
    """
    # Every process of a server loads this module, and only the first one reads the arguments.
    from sglang_qspec.engine.passes.launch.tree_attention import verification_of

    compat.check_version()
    installed.check("front")
    settings = config.from_environment()
    if kind_of(args) == "cpu":
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
    check_draft_model(args, settings)
    return settings


def check_target(args: Any, model_config: Any, settings: QSpecConfig) -> None:
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


def check_draft_model(args: Any, settings: QSpecConfig) -> None:
    """Check that the draft model exists and has the target's tokenizer."""
    path = args.speculative_draft_model_path
    if settings.draft_model_head:
        heads.check_of_draft_model(args, settings)
    if settings.head_path and path is None and not settings.endpoint:
        raise ConfigError(
            f"{config.flag('head_path')} is {settings.head_path!r}, but a head needs an endpoint "
            f"whose sidecar runs it ({config.flag('endpoint')}), or a draft model beside it "
            "(--speculative-draft-model-path); a head alone is the "
            "--speculative-draft-model-path itself"
        )
    if path is None:
        if settings.head_path:
            heads.check_alone(args, settings, config.flag("head_path"), settings.head_path)
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
    if is_head_folder(Path(path).expanduser()):
        if settings.head_path:
            raise ConfigError(
                f"{flag} is the head {path} and {config.flag('head_path')} is "
                f"{settings.head_path!r}: give one head, or a draft model and a head"
            )
        heads.check_alone(args, settings, flag, path)
        return
    if settings.head_path:
        if kind_of(args) != "cpu":
            raise ConfigError(
                f"{config.flag('head_path')} is {settings.head_path!r}, but a head beside a draft "
                "model needs a target on a CPU so far"
            )
        heads.check(args, settings, config.flag("head_path"), Path(settings.head_path).expanduser())
    draft = model_pair.describe_given(
        flag, path, args.trust_remote_code, args.speculative_draft_model_revision
    )
    families.check_checkpoint(
        flag,
        path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
    )
    placed = environment.read()
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
