"""Serves requests with SGLang's scheduler in this process, with and without graphs on the CPU.

Reads the path of a model from the standard input, and prints what `Record` holds for each case as
JSON. A process of its own, since SGLang has one configuration per process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from array import array
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

import sglang_qspec  # noqa: F401  (supplies kernels that SGLang imports on a CPU)

# isort: split
import sglang.srt.managers.scheduler
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_exec, publish, spawn_world_rank
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

BATCHES = (1, 2, 4, 6)
"""Batch sizes with graphs."""
WIDEST = 8
PROMPTS = [[(7 * row + 3 * place) % 200 for place in range(9 + row)] for row in range(5)]
LENGTH = 24
OFF = {"qspec_enabled": False}
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "sampling_seed": 3, "top_p": 0.9},
    {"frequency_penalty": 0.6},
    {"custom_params": OFF},
    {"logprob": True},
]


@dataclass
class Record:
    """What one case did."""

    outputs: list[list[int]]
    """Output tokens of each request."""
    logprobs: list[list[float]]
    """Log probabilities of the output tokens, of requests that ask for them."""
    passes: list[tuple[int, int, bool]] = field(default_factory=list)
    """Width, requests and whether the pass was in a graph, of each decode or verify pass."""
    eager_passes: int = 0
    """Increase of the count in `Totals`."""
    accepted: int = 0
    """Increase of the accepted draft tokens."""


class Serving:
    """One scheduler with QSPEC, and a worker that writes down its passes."""

    def __init__(self, model: str, *, graphs: bool) -> None:
        args = ServerArgs(
            model_path=model,
            device="cpu",
            dtype="float32",
            speculative_algorithm="QSPEC",
            speculative_num_draft_tokens=WIDEST,
            max_running_requests=8,
            max_total_tokens=2048,
            context_length=128,
            disable_radix_cache=True,
            skip_tokenizer_init=True,
            log_level="warning",
        )
        args.resolve_once()
        rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        if graphs:
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
        run = self.worker._run

        def watched(batch: Any, width: int) -> Any:
            result = run(batch, width)
            self._passes.append((width, len(batch.reqs), bool(result.can_run_cuda_graph)))
            return result

        self.worker._run = watched

    @torch.inference_mode()
    def serve(self, params: Sequence[dict[str, Any]], guesses: Sequence[list[int]] = ()) -> Record:
        """Serve `PROMPTS`, one for each of `params`, with a guess for each if there are any."""
        totals = self.worker._speculator.totals
        before = totals.eager_passes, sum(totals.accepted.values())
        self._passes.clear()
        for row, own in enumerate(params):
            custom = dict(own.get("custom_params", {}))
            if guesses:
                custom["qspec_guess_ids"] = list(guesses[row])
            self._add(PROMPTS[row], {**own, "custom_params": custom})
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

    def _add(self, prompt: Sequence[int], params: dict[str, Any]) -> None:
        params = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True, **params}
        logprob = bool(params.pop("logprob", False))
        sampling = SamplingParams(**params)
        sampling.normalize(None)
        self._scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=str(next(self._numbers)),
                input_text="",
                input_ids=array("q", prompt),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=logprob,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        )

    def _step(self) -> None:
        """One iteration of SGLang's `event_loop_normal`."""
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch

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
        serving.worker._speculator.sidecar.stepping = len
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
    model, graphs = json.load(sys.stdin)
    np.random.seed(0)
    load_plugins()
    serving = Serving(model, graphs=graphs)
    found = {name: asdict(record) for name, record in cases(serving).items()}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without waiting for a receiver of the scheduler's messages


if __name__ == "__main__":
    main()
