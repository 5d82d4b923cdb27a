"""Everything of SGLang that QSPEC touches, by name, and whether it is what it is taken for.

SGLang logs and swallows the errors of plugins and of their hooks, so a server could start without
half of QSPEC. Start-up therefore checks what is listed here, and a test compares the list with the
installed release.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_qspec.errors import ConfigError
from sglang_qspec.link.fingerprint import fingerprint

SGLANG_VERSION = "0.5.23"

_COMPLETION = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"
_INTERNAL_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
)

HOOKED = (
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
    "sglang.srt.entrypoints.http_server.serve_generate_request",
    "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
    _COMPLETION + "._convert_to_internal_request",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
)
"""Wrapped in the process that serves HTTP or `sgl.Engine`."""

HOOKED_IN_SCHEDULER = (
    "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
    "sglang.srt.managers.scheduler.Scheduler.send_abort_output",
    "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
    "sglang.srt.speculative.external_corpus_manager.ExternalCorpusManager.check_pending_load",
    _INTERNAL_STATE + "._add_speculative",
)
"""Wrapped in the scheduler's process."""

CALLED = (
    "sglang.srt.arg_groups.overrides.attn_dp_enabled_of",
    "sglang.srt.arg_groups.overrides.resolving_view",
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register",
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo",
    "sglang.srt.managers.overlap_utils.FutureMap",
    "sglang.srt.managers.schedule_batch.ScheduleBatch",
    "sglang.srt.managers.scheduler.GenerationBatchResult",
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer",
    "sglang.srt.managers.utils.is_health_check_generate_req",
    "sglang.srt.model_executor.forward_batch_info.ForwardMode",
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker",
    "sglang.srt.speculative.eagle_utils.eagle_sample",
    "sglang.srt.speculative.ngram_info.NgramVerifyInput",
    "sglang.srt.speculative.spec_utils.GrammarTree.from_host",
    "sglang.srt.speculative.spec_utils.build_grammar_vocab_mask",
    "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache",
    "sglang.srt.layers.logprob_processor.compute_spec_logprobs",
    "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func",
    "sglang.srt.utils.hf_transformers_utils.get_config",
    "sglang.srt.utils.hf_transformers_utils.get_tokenizer",
    "sglang.srt.runtime_context.get_model",
    "sglang.srt.runtime_context.get_serving",
    "sglang.srt.runtime_context.get_spec",
)
"""Called or subclassed."""


@dataclass(frozen=True)
class ModelDescription:
    """What two models must have in common for one to draft for the other."""

    vocab_size: int
    fingerprint: str


def check_version() -> None:
    """Raise ConfigError unless the installed SGLang is the one QSPEC is written for."""
    if sglang.__version__ != SGLANG_VERSION:
        raise ConfigError(
            f"sglang is {sglang.__version__}, but this sglang-qspec works only with "
            f"{SGLANG_VERSION}"
        )


def check_hooks(names: tuple[str, ...] = HOOKED) -> None:
    """Raise ConfigError unless each of `names` is wrapped by this plugin."""
    for name in names:
        hooks = HookRegistry._hooks.get(name, ())
        ours = any(hook.__module__.startswith("sglang_qspec.") for _, hook, _ in hooks)
        if not ours or name not in HookRegistry._patched:
            raise ConfigError(
                f"{name} is not wrapped by QSPEC: the plugin did not load completely; "
                "the log above tells why"
            )


@functools.lru_cache(maxsize=4)
def describe_model(
    path: str, tokenizer_path: str, trust_remote_code: bool, revision: str | None
) -> ModelDescription:
    """Vocabulary size and tokenizer fingerprint of a model, without its weights.

    Raises OSError or ValueError, as transformers does, if there is no such model.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config, get_tokenizer

    hf_config: Any = get_config(path, trust_remote_code=trust_remote_code, revision=revision)
    text_config = getattr(hf_config, "text_config", None) or hf_config
    tokenizer = get_tokenizer(
        tokenizer_path, trust_remote_code=trust_remote_code, tokenizer_revision=revision
    )
    return ModelDescription(text_config.vocab_size, fingerprint(tokenizer.get_vocab()))
