"""What SGLang's attention backends can verify.

The table follows the source of SGLang 0.5.23. A backend that is not in the table verifies trees,
and takes the width of a pass from the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_platform, get_spec

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy import GPU_COST, PassCost

MOST_CHILDREN = 10
"""Largest `speculative_eagle_topk` for trees. It only tells SGLang that drafts branch."""
_XQA = (9, 12)
"""Major compute capabilities on which trtllm_mha uses its XQA kernels, which need equal lengths."""


@dataclass(frozen=True)
class BackendAbilities:
    """What one attention backend can verify."""

    trees: bool = True
    """Whether the backend reads masks, so that a node sees only its ancestors."""
    ragged: bool = False
    """Whether one pass can verify a different number of tokens for each request, also in a CUDA
    graph. A ragged pass takes chains only, because these backends ignore its mask."""
    windows: str = ""
    """Drafts for which layers with a sliding window or attention sinks are right: `trees`,
    `chains` or none. SGLang's backends count a window by rows, which are depths in a chain alone.
    fa3 and fa4 would also count a sink twice, because they merge two passes over a tree."""
    any_width: bool = False
    """Whether the backend reads the width of an eager pass from the pass. Other backends assume the
    width for which they were made, and give wrong logits for a pass of another width."""


_BACKENDS = {
    "qspec_cpu": BackendAbilities(windows="trees", any_width=True),
    "flashinfer": BackendAbilities(any_width=True),
    "triton": BackendAbilities(windows="chains", any_width=True),
    "fa3": BackendAbilities(ragged=True, windows="chains"),
    "fa4": BackendAbilities(ragged=True, windows="chains"),
    "trtllm_mha": BackendAbilities(trees=False, ragged=True),
}


def attention_of(backend: str, capability: int | None = None) -> BackendAbilities:
    """What `backend` can verify; `capability` is the major compute capability, None on a CPU."""
    if backend == "trtllm_mha" and capability in _XQA:
        return BackendAbilities(trees=False)
    return _BACKENDS.get(backend, BackendAbilities())


def verify_backend(view: Any) -> str:
    """Name of the attention backend that verifies; `view` is SGLang's resolving view of arguments.

    With different backends for prefill and decode, `speculative_attention_mode` chooses one.
    """
    prefill, decode = attention_backends_of(view)
    return str(prefill if view.speculative_attention_mode == "prefill" else decode)


def chooses_ragged(view: Any, verify: str) -> bool:
    """Whether a GPU server verifies ragged chains (True) or trees of one width (False).

    `view` is SGLang's resolving view of the server's arguments, after SGLang has chosen the
    attention backend. `verify` is `auto`, `tree` or `ragged`; `auto` takes trees where the backend
    reads their masks. Raises ConfigError if the backend does not support the choice.
    """
    backend = verify_backend(view)
    attention = attention_of(backend, get_platform().device_capability[0])
    # SGLang's CUDA graphs of ragged passes must pad batches, and cannot split them.
    possible = attention.ragged and not (
        view.disable_cuda_graph_padding or view.enable_two_batch_overlap
    )
    if verify == "ragged" and not possible:
        raise ConfigError(
            f"--speculative-qspec-verify is 'ragged', but the attention backend {backend} verifies "
            "the same number of tokens for all requests on this server: use "
            + ("tree" if attention.trees else "--attention-backend flashinfer or triton")
        )
    if attention.trees:
        return verify == "ragged"
    if not possible or verify == "tree":
        raise ConfigError(
            f"--attention-backend is {backend}, which ignores the masks of draft trees: use "
            "flashinfer or triton" + (", or --speculative-qspec-verify ragged" if possible else "")
        )
    return True


def takes_chains(view: Any, model_config: Any) -> bool:
    """Whether this server verifies chains alone, because no tree is right in the target's layers.

    `view` is as in `chooses_ragged`, and `model_config` SGLang's ModelConfig of the target. Raises
    ConfigError if the attention backend gives wrong logits for chains too.
    """
    chunk = model_config.attention_chunk_size
    if chunk is not None and chunk < model_config.context_len:
        raise ConfigError(
            f"--model-path is {view.model_path}, a model with chunked local attention, but QSPEC "
            f"supports it only up to the length of a chunk: use --context-length {chunk} or less"
        )
    backend, kind = verify_backend(view), _local_attention(model_config)
    windows = attention_of(backend).windows
    if kind is None or windows == "trees":
        return False
    if windows == "chains":
        return True
    allowed = "qspec_cpu" if str(view.device).startswith("cpu") else "triton, fa3 or fa4"
    raise ConfigError(
        f"--attention-backend is {backend}, which would verify wrong texts with {view.model_path}, "
        f"a model with {kind}: use {allowed}"
    )


def _local_attention(model_config: Any) -> str | None:
    """What makes some layers of a model see less than a full context; None for no such layer."""
    text = model_config.hf_text_config
    kinds = {str(getattr(kind, "value", kind)) for kind in getattr(text, "layer_types", None) or ()}
    windowed = model_config.is_hybrid_swa or "sliding_attention" in kinds
    window = model_config.sliding_window_size
    if windowed and window is not None and window < model_config.context_len:
        return f"a sliding window of {window} tokens"
    return "attention sinks" if model_config.has_attention_sinks else None


def pass_cost(device: str) -> PassCost:
    """The relative time of a pass by its number of rows, which measured passes scale."""
    return PassCost() if device.startswith("cpu") else GPU_COST


def branching(width: int) -> int:
    """SGLang's `speculative_eagle_topk` for trees of `width` tokens.

    A tree of two tokens is a chain, for which fa3 needs no second pass over the draft tokens.
    """
    return min(MOST_CHILDREN, width) if width > 2 else 1


def prepare(args: Any, *, ragged: bool, chains: bool = False) -> None:
    """Set SGLang's arguments for ragged chains, for `chains` of one width, or for trees.

    Call it in the process that parses the arguments: SGLang's other processes inherit the mode of
    verification through the environment.
    """
    branches = 1 if ragged or chains else branching(args.speculative_num_draft_tokens)
    args.speculative_eagle_topk = branches
    envs.SGLANG_RAGGED_VERIFY_MODE.set("compact" if ragged else "static")


def is_ragged() -> bool:
    """Whether this server verifies ragged chains, as `prepare` set it."""
    return are_chains() and envs.SGLANG_RAGGED_VERIFY_MODE.get() == "compact"


def are_chains() -> bool:
    """Whether this server verifies chains alone, as `prepare` set it."""
    return bool(get_spec().speculative_eagle_topk == 1)
