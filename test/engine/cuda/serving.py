"""Serves requests with SGLang's scheduler in this process, with and without graphs on the CPU.

The program reads the path of a model and one of KINDS from the standard input, and prints a
`Record` for each case as JSON. It runs in a process of its own, since SGLang has one configuration
per process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

import sglang_qspec  # noqa: F401  (supplies kernels that SGLang imports on a CPU)

# isort: split
import sglang.srt.managers.scheduler
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_exec, publish, spawn_world_rank
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from benchmark.overhead.stubbed import send
from sglang_qspec.engine.cuda import backends
from sglang_qspec.engine.passes.launch import batch_split, tree_attention
from sglang_qspec.engine.passes.target_pass import Pass
from test.engine.cuda.prompts import PROMPTS

KINDS = ("eager", "trees", "ragged", "chains")
"""What a process runs: passes without graphs, graphs of several widths, graphs of ragged chains, or
given chains of LENGTHS in graphs of ragged chains. A `Serving` of the kind `cpu` verifies as a CPU
server does."""
BATCHES = (1, 2, 4, 6)
"""Batch sizes with graphs."""
WIDEST = 8
LENGTH = 24
OFF = {"qspec_enabled": False}
LENGTHS = ([1, 1, 1], [8, 1, 3], [0, 8, 2], [1, 8, 8], [5, 0, 0])
"""Tokens of each request, for each ragged pass; 0 leaves the request out."""
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "sampling_seed": 3, "top_p": 0.9},
    {"frequency_penalty": 0.6},
    {"custom_params": OFF},
    {"logprob": True},
]


@dataclass
class Record:
    """The outputs and passes of one case."""

    outputs: list[list[int]]
    """Output tokens of each request."""
    logprobs: list[list[float]]
    """Log probabilities of the output tokens, of requests that ask for them."""
    passes: list[tuple[int, int, bool]] = field(default_factory=list)
    """For each decode or verify pass: width, number of requests, whether it ran in a graph."""
    eager_passes: int = 0
    """Increase of `eager_passes` in `Totals`."""
    accepted: int = 0
    """Increase of the accepted draft tokens."""


class Serving:
    """One scheduler with QSPEC, and a worker that writes down its passes."""

    def __init__(self, model: str, kind: str, **arguments: Any) -> None:
        ragged = kind in ("ragged", "chains")
        if kind != "cpu":
            tree_attention.verification_of = lambda *_: tree_attention.Verification(
                ragged, ragged, chains=ragged
            )
        if ragged:
            backends.prepare = partial(_prepare_ragged, backends.prepare)
        defaults: dict[str, Any] = {
            "model_path": model,
            "device": "cpu",
            "dtype": "float32",
            "speculative_algorithm": "QSPEC",
            "speculative_num_draft_tokens": WIDEST,
            "max_running_requests": 8,
            "max_total_tokens": 2048,
            "context_length": 128,
            "disable_radix_cache": True,
            "skip_tokenizer_init": True,
            "log_level": "warning",
        }
        args = ServerArgs(**{**defaults, **arguments})
        args.resolve_once()
        rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        if kind not in ("eager", "cpu"):
            from test.engine.cuda import called_graphs

            called_graphs.install()
            config = get_exec().graph.cuda_graph_config
            config.decode.bs, config.decode.max_bs = list(BATCHES), max(BATCHES)
            config.decode.backend = Backend.FULL
        self._scheduler = sglang.srt.managers.scheduler.Scheduler(args, PortArgs.init_new(args))
        self.worker = self._scheduler.draft_worker
        self._numbers = iter(range(1 << 20))
        self._passes: list[tuple[int, int, bool]] = []
        self._watch()

    def _watch(self) -> None:
        run = self.worker._launcher._run

        def watched(batch: Any, width: int) -> Any:
            result = run(batch, width)
            self._passes.append((width, len(batch.reqs), bool(result.can_run_cuda_graph)))
            return result

        self.worker._launcher._run = watched

    @torch.inference_mode()
    def serve(
        self,
        params: Sequence[dict[str, Any]],
        guesses: Sequence[Sequence[Any]] = (),
        prompts: Sequence[Sequence[int]] = PROMPTS,
    ) -> Record:
        """Serve `prompts`, one for each of `params`, with guesses for each if there are any."""
        totals = self.worker._leader.speculator.totals
        before = totals.eager_passes, sum(totals.accepted.values())
        self._passes.clear()
        for row, own in enumerate(params):
            custom = dict(own.get("custom_params", {}))
            if guesses:
                custom["qspec_guess_ids"] = list(guesses[row])
            self._add(prompts[row], {**own, "custom_params": custom})
        reqs = list(self._scheduler.waiting_queue)
        assert len(reqs) == len(params)
        while not all(req.finished() for req in reqs):
            self._step()
        logprobs = [req.logprob.output_token_logprobs_val for req in reqs if req.return_logprob]
        return Record(
            [list(req.output_ids_through_stop) for req in reqs],
            [[float(value) for value in row] for row in logprobs],
            list(self._passes),
            totals.eager_passes - before[0],
            sum(totals.accepted.values()) - before[1],
        )

    @torch.inference_mode()
    def verify_chains(self) -> dict[str, Any]:
        """Run ragged passes over chains of `LENGTHS` tokens, and then a plain pass of each request.

        Returns the tokens of each pass, packed, and the likeliest token after each. All passes
        start from the same committed tokens.
        """
        worker, graphs = self.worker, self.worker._graphs
        found: dict[str, Any] = {"tiers": graphs.tiers, "widths": graphs.widths(2), "passes": []}
        for row in range(len(LENGTHS[0])):
            self._add(PROMPTS[row], {"custom_params": OFF})
        self._step()
        batch = self._next_batch()
        for lengths in LENGTHS:
            rows = [row for row, length in enumerate(lengths) if length]
            part = batch_split.take(batch, rows)
            packed, chains = self._pack(part, [lengths[row] for row in rows])
            result = worker._launcher._run(packed, WIDEST)
            logits = result.logits_output.next_token_logits
            found["passes"].append(
                {
                    "rows": rows,
                    "chains": chains,
                    "next": logits.argmax(-1).tolist(),
                    "in_graph": bool(result.can_run_cuda_graph),
                }
            )
        with self._scheduler._forward_isolation(batch, overlap=False):
            plain = Pass(batch)
            worker._launcher.plain(plain)
        found["plain"] = bool(plain.result.can_run_cuda_graph)
        return found

    def _pack(self, batch: Any, lengths: list[int]) -> tuple[Any, list[list[int]]]:
        """Make `batch` a ragged pass over chains that continue the last tokens arbitrarily."""
        chains = [
            [req.output_ids[-1], *range(300 + 10 * row, 300 + 10 * row + length - 1)]
            for row, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True))
        ]
        owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        offsets = torch.cat([torch.arange(length) for length in lengths])
        positions = batch.seq_lens[owners] + offsets
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = torch.tensor([token for chain in chains for token in chain])
        slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[owners], positions]
        batch.out_cache_loc = slots.long()
        batch.spec_info = NgramVerifyInput(
            custom_mask=torch.ones(1, dtype=torch.bool), positions=positions, draft_token_num=WIDEST
        )
        batch.spec_info.ragged_verify_layout = RaggedVerifyLayout.from_verify_lens(
            verify_lens_cpu=lengths, device=torch.device("cpu"), grid=[sum(lengths)]
        )
        return batch, chains

    def _add(self, prompt: Sequence[int], params: dict[str, Any]) -> None:
        params = {"max_new_tokens": LENGTH, **params}
        send(self._scheduler, next(self._numbers), prompt, **params)

    def _step(self) -> None:
        """One iteration of SGLang's `event_loop_normal`."""
        batch = self._next_batch()
        if batch:
            self._scheduler.process_batch_result(batch, self._scheduler.run_batch(batch))
        self._scheduler.last_batch = batch

    def _next_batch(self) -> Any:
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        return plan.batch_to_run

    @contextmanager
    def settings(self, **values: Any) -> Any:
        """Run the block with other runtime settings."""
        runtime = self.worker._runtime
        kept = {name: getattr(runtime, name) for name in values}
        for name, value in values.items():
            setattr(runtime, name, value)
        yield
        for name, value in kept.items():
            setattr(runtime, name, value)


def _prepare_ragged(prepare: Callable[..., None], args: Any, **_: bool) -> None:
    prepare(args, ragged=True)


def cases(serving: Serving) -> dict[str, Record]:
    """All cases; those with guesses are half right, so that passes accept and reject tokens."""
    plain = serving.serve([{"custom_params": OFF}] * 5)
    records = {"off": plain}
    guesses = [[*output[:15], 199, *output[16:]] for output in plain.outputs]
    for width in (2, 4, WIDEST):
        with serving.settings(fixed_width=True, draft_token_num=width):
            records[f"width {width}"] = serving.serve([{}] * 5, guesses)
            records[f"one request at width {width}"] = serving.serve([{}], guesses)
    records["adaptive"] = serving.serve([{}] * 5, guesses)
    with serving.settings(mode="halves"):
        serving.worker._leader.speculator.sidecar.stepping = len
        records["halves"] = serving.serve([{}] * 5, guesses)
    penalties = {"frequency_penalty": 0.6, "repetition_penalty": 1.1}
    records["penalised"] = serving.serve([penalties] * 5, guesses)
    records["mixed"] = serving.serve(MIXED, guesses)
    with serving.settings(enabled=False):
        records["switched off"] = serving.serve(MIXED)
    return records


def main() -> None:
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang may print
    logging.basicConfig(level=logging.INFO)
    model, kind = json.load(sys.stdin)
    load_plugins()
    serving = Serving(model, kind)
    found: dict[str, Any]
    if kind == "chains":
        found = serving.verify_chains()
    else:
        found = {name: asdict(record) for name, record in cases(serving).items()}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without waiting for a receiver of the scheduler's messages


if __name__ == "__main__":
    main()
