"""The settings of SGLang that QSPEC restricts, each with the reason."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.arg_groups.overrides import attn_dp_enabled_of
from sglang.srt.environ import envs

from sglang_qspec.engine.placement.devices import kind_of
from sglang_qspec.errors import ConfigError


class Restriction(NamedTuple):
    """One setting with its present value."""

    refused: bool
    name: str
    value: object
    allowed: str
    reason: str


def check(args: Any) -> None:
    """Raise ConfigError for the first setting whose value QSPEC does not support.

    `args` is SGLang's resolving view of its server arguments.
    """
    for refused, name, value, allowed, reason in restrictions(args):
        if refused:
            raise ConfigError(f"{name} is {value}, but QSPEC supports only {allowed}: {reason}")


def restrictions(args: Any) -> list[Restriction]:
    """Each setting that QSPEC restricts; parallelism first."""
    return [*_parallelism(args), *_others(args)]


def _parallelism(args: Any) -> list[Restriction]:
    return [
        Restriction(
            args.nnodes != 1,
            "--nnodes",
            args.nnodes,
            "1",
            "its settings and its sidecar belong to one machine",
        ),
        Restriction(
            args.attn_cp_size != 1,
            "--attn-cp-size",
            args.attn_cp_size,
            "1",
            "a rank would have only a part of each prompt's tokens, and trees need all of them",
        ),
        Restriction(
            args.dcp_size != 1,
            "--dcp-size",
            args.dcp_size,
            "1",
            "a rank would have only a part of each request's KV, in which QSPEC moves accepted "
            "tokens",
        ),
        Restriction(
            args.pp_size != 1,
            "--pp-size",
            args.pp_size,
            "1",
            "SGLang runs pipeline stages with no other speculation than its own EAGLE and DSPARK",
        ),
        Restriction(
            attn_dp_enabled_of(args),
            "--attn-dp-size",
            args.attn_dp_size,
            "1",
            "each rank would have other requests, but rank 0 chooses the drafts of all ranks",
        ),
        Restriction(
            args.disaggregation_mode != "null",
            "--disaggregation-mode",
            args.disaggregation_mode,
            "null",
            "SGLang's decode servers cannot begin a request of an NGRAM-like algorithm without its "
            "prefill",
        ),
    ]


def _others(args: Any) -> list[Restriction]:
    device = kind_of(args)
    return [
        Restriction(
            device not in ("cpu", "cuda"),
            "--device",
            args.device,
            "cpu and cuda",
            "its tree verification needs a backend of these devices",
        ),
        Restriction(
            args.page_size not in (None, 1) and args.attention_backend != "flashinfer",
            "--page-size",
            args.page_size,
            "1 (or a larger page with --attention-backend flashinfer)",
            "accepted tokens of a tree move one by one",
        ),
        Restriction(
            args.tokenizer_worker_num != 1,
            "--tokenizer-worker-num",
            args.tokenizer_worker_num,
            "1",
            "other tokenizer processes would not read guesses",
        ),
        Restriction(
            bool(envs.SGLANG_RUST_SERVER.get()),
            "SGLANG_RUST_SERVER",
            envs.SGLANG_RUST_SERVER.get(),
            "false",
            "the server in Rust bypasses the hooks that check requests and read guesses",
        ),
        Restriction(
            bool(args.is_embedding),
            "--is-embedding",
            args.is_embedding,
            "generation",
            "an embedding model decodes no tokens",
        ),
        Restriction(
            args.dllm_algorithm is not None,
            "--dllm-algorithm",
            args.dllm_algorithm,
            "no such algorithm",
            "a diffusion model decodes blocks of tokens, not one token after the other",
        ),
        Restriction(
            bool(args.enable_pdmux),
            "--enable-pdmux",
            args.enable_pdmux,
            "false",
            "passes over prompts would run at the same time as verify passes",
        ),
        Restriction(
            bool(args.speculative_adaptive),
            "--speculative-adaptive",
            args.speculative_adaptive,
            "false",
            "QSPEC chooses the width of each pass itself",
        ),
        *(
            Restriction(
                getattr(args, name) != 1.0,
                "--" + name.replace("_", "-"),
                getattr(args, name),
                "1.0",
                "below 1 the target would accept draft tokens that it did not choose",
            )
            for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        ),
        Restriction(
            bool(args.enable_mixed_chunk),
            "--enable-mixed-chunk",
            args.enable_mixed_chunk,
            "false",
            "SGLang verifies no trees in a pass with parts of prompts",
        ),
        Restriction(
            device == "cpu" and bool(args.enable_torch_compile),
            "--enable-torch-compile",
            args.enable_torch_compile,
            "false on a cpu",
            "passes have many different widths",
        ),
    ]
