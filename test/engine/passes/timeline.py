"""Serves the cases of `test_timeline` on a fake device, and prints the events of each as JSON.

The program runs in a process of its own, since SGLang has one configuration per process. Its first
argument says whether the server has QSPEC.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

from benchmark.overhead.stubbed import Stubbed, answer_of, model, prompt_of

OFF = {"custom_params": {"qspec_enabled": False}}


class Allowing(BaseGrammarObject):
    """A grammar that allows every token."""

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return torch.zeros(batch_size, vocab_size, device=device)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None: ...

    def move_vocab_mask(self, vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
        return vocab_mask

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None: ...

    def accept_token(self, token: int) -> None: ...

    def is_terminated(self) -> bool:
        return False


class Timeline:
    """A scheduler of eight requests whose settlement writes down what it does, pass by pass."""

    def __init__(self, folder: str, *, qspec: bool) -> None:
        self.stubbed = Stubbed(folder, qspec=qspec, requests=8)
        self.cases: dict[str, dict[str, Any]] = {}
        self._slots = self.stubbed.scheduler.token_to_kv_pool_allocator
        self._free = self._slots.available_size()
        if self.stubbed.worker is not None:
            self._watch(self.stubbed.worker._settlement)

    def _watch(self, settlement: Any) -> None:
        device, passes = self.stubbed.device, dict[int, int]()
        add, commit, account = settlement.add, settlement._commit, settlement._account
        count = settlement._count

        def added(launched: Any) -> None:
            passes[id(launched)] = device.launched
            add(launched)

        def committed(launched: Any, outcome: Any) -> Any:
            device.events.append(("commit", passes[id(launched)]))
            return commit(launched, outcome)

        def accounted(settled: Any) -> None:
            device.events.append(("account", passes[id(settled.launched)]))
            account(settled)

        def counted(launched: Any) -> None:
            count(launched)
            device.events += [(name, passes[id(launched)]) for name in ("commit", "account")]

        settlement.add, settlement._count = added, counted
        settlement._commit, settlement._account = committed, accounted

    def serve(
        self, case: str, *params: dict[str, Any], abort: int = 0, grammar: bool = False
    ) -> None:
        """Serve a request for each of `params`; the first is aborted after pass `abort`."""
        stubbed = self.stubbed
        stubbed.device.events.clear()
        reqs = [
            stubbed.add(prompt_of(row), **{"max_new_tokens": 12, **own})
            for row, own in enumerate(params)
        ]
        if grammar:
            reqs[0].grammar = Allowing()
        until = stubbed.device.launched + abort

        def each() -> bool:
            if abort and stubbed.device.launched == until:
                from sglang.srt.managers.io_struct import AbortReq

                stubbed.scheduler.abort_request(AbortReq(rid=reqs[0].rid))
            return stubbed.scheduler.last_batch is not None or bool(stubbed.scheduler.waiting_queue)

        stubbed.run(each)
        for row, req in enumerate(reqs):
            output = list(req.output_ids_through_stop)
            assert output == answer_of(prompt_of(row), len(output)), case
            assert len(output) == params[row].get("max_new_tokens", 12) or req is reqs[0]
        assert self._slots.available_size() == self._free, case
        self.cases[case] = {
            "events": list(stubbed.device.events),
            "lengths": [len(req.output_ids_through_stop) for req in reqs],
            "passes": [req.spec_verify_ct for req in reqs],
        }

    @contextmanager
    def width(self, width: int) -> Iterator[None]:
        """Run the block with passes of one width."""
        if self.stubbed.worker is None:
            yield
            return
        runtime = self.stubbed.worker._runtime
        kept = runtime.fixed_width, runtime.draft_token_num
        runtime.fixed_width, runtime.draft_token_num = width > 1, width
        yield
        runtime.fixed_width, runtime.draft_token_num = kept


def main() -> None:
    torch.set_num_threads(1)
    with model() as folder:
        timeline = Timeline(folder, qspec=sys.argv[1] == "qspec")
    guesses = [[answer_of(prompt_of(row), 12)] for row in range(3)]
    right = [{"custom_params": {"qspec_guess_ids": guess}} for guess in guesses]
    with timeline.width(1):
        timeline.serve("plain", {}, {}, {})
        timeline.serve("finishing", {"max_new_tokens": 4}, {}, {"max_new_tokens": 7})
        timeline.serve("aborted", {}, {}, {}, abort=5)
        timeline.serve("grammar", {}, {}, {}, grammar=True)
        timeline.serve("penalty", {"frequency_penalty": 0.1}, {}, {})
    with timeline.width(4):
        timeline.serve("verify", *right)
        timeline.serve("mixed", *right[:2], OFF)
        timeline.serve("off", OFF, OFF, OFF)
    sys.stdout.write(json.dumps(timeline.cases) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without waiting for a receiver of the scheduler's messages


if __name__ == "__main__":
    main()
