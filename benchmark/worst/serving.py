"""Serving a cell: one configuration's requests of a block, sent at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmark.harness.others import Others
from benchmark.harness.server import Server
from benchmark.parallel.serving import await_drafts, state_of, turn
from benchmark.worst.cases import ADAPTIVE, BASELINE, BY_NAME, GUESSES, Block, width_of
from benchmark.worst.loads import Load, misleading, sampling

WARM_UP_TOKENS = 8
MODE = 4
"""`auto`, of `qspec_mode`."""
LEAD = 16
"""How far drafts run ahead of what is committed; a server's default."""


@dataclass(frozen=True)
class CellRun:
    """What became of a cell. Counts are of the cell alone; they are 0 without speculation."""

    seconds: float
    """From the sending to the last answer."""
    tokens: int
    passes: int
    """In which a request took part, summed over the requests, as are the next two."""
    proposed: int
    """Draft tokens."""
    accepted: int
    waited_seconds: float
    """For drafts."""
    others_share: float
    """Of all processors, what went to anything but the server, its sidecar and the client."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Client:
    """Serves cells; remembers answers, which the guesses of later rounds are made from."""

    def __init__(self, vocab_size: int, width: int) -> None:
        """`width` is the widest of a pass, in tokens of a request."""
        self._vocab_size = vocab_size
        self._width = width
        self._guesses: dict[tuple[int, ...], list[int | None]] = {}

    def serve(self, server: Server, block: Block, config: str, load: Load) -> CellRun:
        """Set the server up, warm it up, empty its cache but for shared prompts, and serve.

        Raises ServerError, OSError, or RuntimeError if the sidecar does not draft.
        """
        case, speculating = BY_NAME[block.case], config != BASELINE
        turn(server, {"pp_max_micro_batch_size": block.running})
        if speculating:
            self._set_up(server, block, config)
        if speculating and case.name == GUESSES:
            self._learn(server, load)
        else:
            _ask(server, load, [sampling(case.temperature, WARM_UP_TOKENS)] * len(load.prompts))
        if not load.shared:
            server.post("/flush_cache?timeout=10", {})
        asked = [
            sampling(case.temperature, load.max_new_tokens, **self._asked(block, prompt))
            if speculating
            else sampling(case.temperature, load.max_new_tokens)
            for prompt in load.prompts
        ]
        before = _waited(server) if speculating else 0.0
        began, others = time.monotonic(), Others(server)
        answers = _ask(server, load, asked)
        seconds, share = time.monotonic() - began, others.share()
        records = [answer["meta_info"].get("qspec") or {} for answer in answers]
        return CellRun(
            seconds,
            sum(len(answer["output_ids"]) for answer in answers),
            *(
                sum(record.get(name, 0) for record in records)
                for name in ("passes", "proposed_tokens", "accepted_tokens")
            ),
            _waited(server) - before if speculating else 0.0,
            share,
        )

    def _set_up(self, server: Server, block: Block, config: str) -> None:
        fixed = width_of(config)
        assert fixed is not None or config == ADAPTIVE
        runtime = {
            "qspec_mode": MODE,
            "qspec_step_tokens": LEAD,
            "qspec_draft_token_num": fixed or self._width,
            "qspec_fixed_width": int(fixed is not None),
        }
        turn(server, runtime)
        if not BY_NAME[block.case].misled:
            prompts = [f"Chapter {number}." for number in range(block.running + 2)]
            body = {"text": prompts, "sampling_params": sampling(0.0, WARM_UP_TOKENS)}
            await_drafts(server, lambda: server.post("/generate", body))

    def _learn(self, server: Server, load: Load) -> None:
        """The answers that guesses are to mislead about; decoded plainly, so that nothing else is
        learnt from them."""
        unknown = [prompt for prompt in load.prompts if prompt not in self._guesses]
        if unknown:
            plain = sampling(0.0, load.max_new_tokens, qspec_enabled=False)
            found = Load(tuple(unknown), load.max_new_tokens)
            answers = _ask(server, found, [plain] * len(unknown))
            for prompt, answer in zip(unknown, answers, strict=True):
                self._guesses[prompt] = misleading(answer["output_ids"], self._vocab_size)

    def _asked(self, block: Block, prompt: tuple[int, ...]) -> dict[str, Any]:
        """What a request asks of speculation."""
        asked: dict[str, Any] = {}
        if BY_NAME[block.case].sources:
            asked["qspec_sources"] = list(BY_NAME[block.case].sources)
        if block.case == GUESSES:
            asked["qspec_guess_ids"] = self._guesses[prompt]
        return asked


def _ask(server: Server, load: Load, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all prompts; what they share is read once, before the others."""
    if load.shared:
        only = {"input_ids": list(load.prompts[0][: load.shared])}
        server.post("/generate", {**only, "sampling_params": sampling(0.0, 1)})
    prompts = [list(prompt) for prompt in load.prompts]
    answers: list[dict[str, Any]] = server.post(
        "/generate", {"input_ids": prompts, "sampling_params": asked}
    )
    return answers


def _waited(server: Server) -> float:
    pipelines = state_of(server)["pipelines"].values()
    return float(sum(totals["waited_seconds"] for totals in pipelines))
