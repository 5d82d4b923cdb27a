"""The draft model with its KV rows, run by SGLang's model runner without SGLang's scheduler.

In the sidecar, only this file and `sidecar.loading` import sglang. They do so in functions:
`loading` says why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_qspec.cpu.native import use_for_drafts
from sglang_qspec.link.fingerprint import fingerprint
from sglang_qspec.sidecar import working_memory
from sglang_qspec.sidecar.burst import Burst
from sglang_qspec.sidecar.draft_kv import PassInput
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.loading import DraftModelOptions, LoadError, load, prefill_tokens, slots
from sglang_qspec.sidecar.memory import release_unused
from sglang_qspec.transfers import to_device


class DraftModel:
    """`DraftKV` of a model that SGLang loads. Not thread-safe."""

    def __init__(
        self, options: DraftModelOptions, *, drafts_only: bool = True, keeps_states: bool = False
    ) -> None:
        """Load the model, which takes seconds.

        With `drafts_only` false it computes as a target does: without the compiled decoder. With
        `keeps_states` it has `states`.

        Raises LoadError if the model does not exist, SGLang cannot run it on this device, or its
        KV cache is not one pool with pages of one token. Raises ConfigError if a CUDA kernel does
        not take the shape of its quantized layers.
        """
        if drafts_only:
            use_for_drafts()
        runner, self._fixed_bytes = load(options)
        pool = runner.req_to_token_pool
        allocator = runner.token_to_kv_pool_allocator
        if allocator.page_size != 1 or not hasattr(allocator, "free_pages"):
            raise LoadError(
                f"{options.model_path} keeps its KV in a {type(allocator).__name__}, but a draft "
                "model needs one pool with pages of one token; models with a sliding window or a "
                "state space are not supported"
            )
        self.name = os.path.basename(os.path.normpath(options.model_path))
        self._runner = runner
        self._options = options
        self._device = torch.device(runner.device)
        kv_slots = allocator.alloc(allocator.available_size()).cpu().numpy()
        self._keeps_states = keeps_states
        self._states: torch.Tensor | None = None
        self.rows = KVRows(pool.req_to_token, int(runner.model_config.context_len), kv_slots)

    @property
    def vocab_size(self) -> int:
        return int(self._runner.model_config.vocab_size)

    @property
    def states(self) -> torch.Tensor:
        assert self._states is not None, "the model does not keep its states, or has run no pass"
        return self._states

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self._runner.model_config.hf_eos_token_id or ())

    @property
    def quantization(self) -> str | None:
        return self._runner.model_config.quantization or None

    @property
    def dtype(self) -> str:
        """Data type of the activations."""
        return str(self._runner.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def prefill_tokens(self) -> int:
        """Maximum number of prompt tokens in a pass; a pass delays all completions."""
        return prefill_tokens(self._options)

    @property
    def slots(self) -> int:
        """Maximum number of rows in a decode pass."""
        return slots(self._options)

    def fingerprint(self) -> str:
        """Digest of the model's vocabulary, which must equal the target's."""
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        tokenizer = get_tokenizer(
            self._options.model_path,
            trust_remote_code=self._options.trust_remote_code,
            revision=self._options.revision,
        )
        found = fingerprint(tokenizer.get_vocab())
        del tokenizer
        release_unused()
        return found

    def report_memory(self) -> None:
        """Log what the passes so far have taken of a GPU's memory."""
        if self._device.type == "cuda":
            working_memory.report(
                working_memory.working_bytes(self._fixed_bytes), self._options.mem_fraction
            )

    def unload(self) -> None:
        """Destroy SGLang's process groups; the model cannot be used afterwards."""
        from sglang.srt.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        destroy_model_parallel()
        destroy_distributed_environment()

    def step(self, rows: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Append one token to each of the distinct `rows`, in one decode pass; as `extend`."""
        burst = Burst(self.rows, rows, token_ids, [1] * len(rows))
        return self.decode(burst.inputs(0), burst.token_ids)

    @torch.inference_mode()
    def decode(self, given: PassInput, token_ids: torch.Tensor) -> torch.Tensor:
        return self._forward(
            forward_mode=_modes().DECODE,
            batch_size=len(token_ids),
            input_ids=token_ids,
            req_pool_indices=given.rows,
            req_pool_indices_cpu=torch.from_numpy(given.host_rows),
            seq_lens=given.lengths,
            seq_lens_cpu=torch.from_numpy(given.host_lengths),
            seq_lens_sum=int(given.host_lengths.sum()),
            orig_seq_lens=given.lengths,
            out_cache_loc=given.slots,
            positions=given.positions,
        )

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        host_rows = np.array(rows, np.int64)
        host_counts = np.array([len(part) for part in token_ids], np.int64)
        host_prefixes = np.array([self.rows.length(row) for row in rows], np.int64)
        host_lengths = host_prefixes + host_counts
        added = self.rows.append(rows, host_counts.tolist())
        at, positions, slots, tokens, own, lengths, counts, prefixes, starts = to_device(
            self._device,
            *added,
            np.concatenate([np.array(part, np.int64) for part in token_ids]),
            host_rows,
            host_lengths,
            host_counts.astype(np.int32),
            host_prefixes.astype(np.int32),
            (host_counts.cumsum() - host_counts).astype(np.int32),
        )
        self.rows.place(at, positions, slots)
        return self._forward(
            forward_mode=_modes().EXTEND,
            batch_size=len(rows),
            input_ids=tokens,
            req_pool_indices=own,
            req_pool_indices_cpu=torch.from_numpy(host_rows),
            seq_lens=lengths,
            seq_lens_cpu=torch.from_numpy(host_lengths),
            seq_lens_sum=int(host_lengths.sum()),
            orig_seq_lens=lengths,
            out_cache_loc=slots,
            positions=positions,
            extend_num_tokens=len(slots),
            extend_seq_lens=counts,
            extend_seq_lens_cpu=host_counts.tolist(),
            extend_prefix_lens=prefixes,
            extend_prefix_lens_cpu=host_prefixes.tolist(),
            extend_start_loc=starts,
            extend_logprob_start_lens_cpu=host_counts.tolist(),
        )

    def _forward(self, **fields: Any) -> torch.Tensor:
        """Run a forward pass; return each row's last logits, float [rows, vocab_size]."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        keeps = self._keeps_states
        if self._runner.model_config.model_is_mrope:
            # The three coordinates of a token of text are its position.
            fields["mrope_positions"] = fields["positions"].unsqueeze(0).expand(3, -1)
        batch = ForwardBatch(
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.LAST if keeps else CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=fields["input_ids"].shape[0],
            **fields,
        )
        translator = self._runner.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        output = self._runner.forward(batch).logits_output
        if keeps:
            self._states = output.hidden_states
        logits: torch.Tensor = output.next_token_logits
        return logits[:, : self.vocab_size]


def _modes() -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode
