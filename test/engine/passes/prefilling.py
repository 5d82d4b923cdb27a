"""Serves requests with SGLang's scheduler, and drafts the answers before the prompts run.

The program reads the path of a model, and whether SGLang's overlap scheduler is on, from the
standard input. It prints a `Record` for each case as JSON. It runs in a process of its own, since
SGLang has one configuration per process.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch

from test.engine.cuda.prompts import PROMPTS
from test.engine.cuda.serving import OFF, Serving

# isort: split
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.plugins import load_plugins

from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.passes import prefill_tokens
from sglang_qspec.engine.passes.launch import prefill_hooks
from sglang_qspec.engine.start import arguments

LENGTH = 24
CHUNK = 8
"""Tokens of a prefill chunk; each prompt has more."""
MOST_STEPS = 300
"""Passes of a case; only a broken build reaches the limit."""
SAMPLED = [{"temperature": 1.0, "sampling_seed": 3 + row, "top_p": 0.9} for row in range(5)]
PENALIZED = [{"frequency_penalty": 0.6, "repetition_penalty": 1.1}] * 5


@dataclass
class Record:
    """The answers and passes of one case."""

    outputs: list[list[int]]
    """Tokens of each answer."""
    passes: int
    """Number of decode passes."""
    records: list[dict[str, Any] | None]
    """`meta_info["qspec"]` of each request."""
    labels: list[list[str]]
    """Provenance of the tokens of each answer."""
    first: list[int]
    """Tokens of each answer after its prefill."""
    prefills: int
    """Number of passes over prompts, including repeated prefills."""
    cached: list[int]
    """Number of tokens of each prompt that came from the cache."""
    free: int
    """Number of KV slots that are free or cached after the last answer."""
    retracted: int
    """Number of requests that SGLang retracted."""


class Prefilling(Serving):
    """Runs SGLang's scheduler and counts its prefills."""

    def __init__(self, model: str, *, overlap: bool) -> None:
        if overlap:
            arguments.OVERLAPS.add("cpu")
        given = {"disable_radix_cache": False, "chunked_prefill_size": CHUNK}
        super().__init__(model, "eager", **given)
        assert self._scheduler.enable_overlap == overlap
        self._launched: deque[tuple[Any, Any]] = deque()
        """Passes with results that SGLang has not processed."""
        self.before: Callable[[Any], None] | None = None
        """Called between a pass and the processing of its result."""

    @torch.inference_mode()
    def answer(self, params: Sequence[dict[str, Any]], guesses: Sequence[list[int]] = ()) -> Record:
        """Serve `PROMPTS`, one for each of `params`, with a guess for each if there are any."""
        running = self._scheduler
        self._passes.clear()
        prefills = retracted = 0
        for row, own in enumerate(params):
            custom = {"qspec_return_provenance": True, **own.get("custom_params", {})}
            if guesses:
                custom["qspec_guess_ids"] = list(guesses[row])
            self._add(PROMPTS[row], {**own, "custom_params": custom})
        reqs = list(running.waiting_queue)
        first: dict[Any, int] = {}
        tallies: dict[str, Any] = {}
        end = self.worker._leader.speculator.end

        def ended(rid: str, *args: Any) -> Any:
            tallies[rid] = end(rid, *args)
            return tallies[rid]

        self.worker._leader.speculator.end = ended
        for step in count():
            if all(req.finished() for req in reqs):
                break
            assert step < MOST_STEPS, "the requests do not end"
            batch = self._next_batch()
            if batch:
                prefills += batch.forward_mode.is_extend()
                result = running.run_batch(batch)
                self._launched.append((batch.copy() if running.enable_overlap else batch, result))
            # With overlap SGLang processes a result when the next pass has been launched.
            waiting = bool(batch) and running.enable_overlap
            while len(self._launched) > waiting:
                self._process(*self._launched.popleft())
            for req in reqs:
                if req.output_ids:
                    first.setdefault(req, len(req.output_ids))
            running.last_batch = batch
            retracted += sum(req.is_retracted for req in reqs)
        del self.worker._leader.speculator.end
        allocator, cache = running.token_to_kv_pool_allocator, running.tree_cache
        self.worker._leader.speculator.check_integrity()
        return Record(
            [list(req.output_ids_through_stop) for req in reqs],
            len(self._passes),
            [None if (tally := tallies.get(req.rid)) is None else tally.record() for req in reqs],
            [
                list(req.customized_info[provenance.KEY])[: len(req.output_ids_through_stop)]
                for req in reqs
            ],
            [first[req] for req in reqs],
            prefills,
            [req.cached_tokens for req in reqs],
            allocator.available_size() + cache.evictable_size(),
            retracted,
        )

    def _process(self, batch: Any, result: Any) -> None:
        if self.before is not None:
            self.before(batch)
        self._scheduler.process_batch_result(batch, result)

    def flush(self) -> None:
        """Drop the cached prompts."""
        self._scheduler.last_batch = None
        assert not self._next_batch()  # removes what has ended
        self._scheduler.last_batch = None
        assert self._scheduler.flush_cache()


def cases(serving: Prefilling) -> dict[str, Record]:
    """All cases; each guess is right, or wrong at its fourth token."""
    found: dict[str, Record] = {}

    def case(name: str, *args: Any, **settings: Any) -> Record:
        serving.flush()
        with serving.settings(**{"fixed_width": True, **settings}):
            found[name] = serving.answer(*args)
        return found[name]

    plain = case("plain", [{"custom_params": OFF}] * 5)
    right = plain.outputs
    wrong = [[*output[:3], 199, *output[4:]] for output in right]
    case("without", [{}] * 5, right, prefill_drafts=False)
    case("right", [{}] * 5, right)
    case("wrong", [{}] * 5, wrong)
    case("adaptive", [{}] * 5, right, fixed_width=False)
    case("one", [{}], right)
    case("again", [{}] * 5, right)
    with serving.settings(fixed_width=True):
        found["cached"] = serving.answer([{}] * 5, right)
    for name, params in (("sampled", SAMPLED), ("penalized", PENALIZED)):
        off = case(f"{name} plain", [{**own, "custom_params": OFF} for own in params])
        case(name, params, [[*output[:5], 199] for output in off.outputs])
    stops = [{"stop_token_ids": [output[2]]} for output in right]
    case("stopped plain", [{**own, "custom_params": OFF, "ignore_eos": False} for own in stops])
    case("stopped", [{**own, "ignore_eos": False} for own in stops], right)
    for length in (1, 2, 3):
        case(f"{length} tokens", [{"max_new_tokens": length}] * 5, right)
    case("mixed", [{}, {"custom_params": OFF}, {"temperature": 1.0, "sampling_seed": 5}], right)
    case("log probabilities", [{}, {"logprob": True}], right)

    serving.before = _abort
    case("aborted", [{}], right)
    serving.before = None
    with patched(prefill_hooks, "logits_at", lambda rows: nullcontext(rows)):
        case("without logits", [{}] * 5, right)
    commit = prefill_tokens.commit
    failed: set[Any] = set()

    def failing(req: Any) -> int:
        """Fails at the first end of a pass of each request."""
        if sys._getframe(1).f_code.co_name == "update_finish_state" and req not in failed:
            failed.add(req)
            raise RuntimeError("this hook fails as the test asks")
        return commit(req)

    with patched(prefill_tokens, "commit", failing):
        case("recovered", [{}] * 5, right)
        case("recovered and stopped", [{**own, "ignore_eos": False} for own in stops], right)
    with patched(scheduler, "TEST_RETRACT", True), patched(scheduler, "TEST_RETRACT_INTERVAL", 8):
        case("retracted", [{}] * 5, right, draft_token_num=3)
    case("after all", [{}] * 5, right)
    return found


def _abort(batch: Any) -> None:
    req = batch.reqs[-1]
    if batch.forward_mode.is_extend() and req.extend_end == len(req.full_untruncated_fill_ids):
        req.to_finish = FINISH_ABORT()


@contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which the module has another value of a name."""
    before = getattr(module, name)
    setattr(module, name, value)
    yield
    setattr(module, name, before)


def main() -> None:
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang may print
    load_plugins()
    model, overlap = json.load(sys.stdin)
    serving = Prefilling(model, overlap=overlap)
    sys.stdout.write(
        json.dumps({name: asdict(record) for name, record in cases(serving).items()}) + "\n"
    )
    sys.stdout.flush()
    os._exit(0)  # without waiting for a receiver of the scheduler's messages


if __name__ == "__main__":
    main()
