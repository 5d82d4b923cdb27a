"""Serves the cells of `bench_worst_case`, and makes wrong guesses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.harness.cells import Cell
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.serving import Raw, Sent, send_batch, serve, warm_up
from benchmark.harness.speculation import update_settings
from benchmark.peers.pipelines import AUTO, PIPELINES
from benchmark.worst.cases import ADAPTIVE, BASELINE, BY_NAME, GUESSES, ONE_WIDTH, width_of
from benchmark.worst.loads import Prompts, misleading, sampling

WARM_UP_TOKENS = 8


def vocab_size_of(model: Path) -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(model).vocab_size
    return size


class Client:
    """Serves cells, and keeps the wrong guesses that it has made for each prompt."""

    def __init__(self, vocab_size: int, width: int, *, ragged: bool) -> None:
        """`width` is the maximum width of a pass, in tokens of a request.

        `ragged` says whether passes of the adaptive configuration are ragged.
        """
        self._vocab_size = vocab_size
        self._width = width
        self._ragged = ragged
        self._guesses: dict[tuple[int, ...], list[int | None]] = {}

    def serve(self, server: Server, cell: Cell, load: Prompts) -> Run:
        """Set the server to the cell, and serve; errors as in `harness.serving.serve`."""
        case, speculating = BY_NAME[cell["case"]], cell.config != BASELINE
        update_settings(server, {"pp_max_micro_batch_size": cell["in_flight"]})
        if speculating:
            update_settings(server, self._runtime(cell.config))
        if speculating and case.name == GUESSES:
            self._learn(server, load)
        custom = [self._custom(cell, prompt) if speculating else {} for prompt in load.prompts]
        asked = [sampling(case.temperature, load.max_new_tokens, **one) for one in custom]
        short = [sampling(case.temperature, WARM_UP_TOKENS)] * len(load.prompts)

        def warm() -> None:
            if speculating and not case.misled:
                warm_up(server, cell["in_flight"] + 2, sampling(0.0, WARM_UP_TOKENS))
            _ask(server, load, short)

        return serve(
            server,
            lambda: Sent(_ask(server, load, asked)),
            warm,
            has_sidecar=speculating,
            await_sidecar=not case.misled,
            # The common beginning of the prompts stays in the cache.
            flush=not load.shared,
        )

    def _runtime(self, config: str) -> dict[str, int]:
        fixed = width_of(config)
        assert fixed is not None or config in (ADAPTIVE, ONE_WIDTH)
        auto = replace(PIPELINES[AUTO], fixed=fixed is not None)
        ragged = int(self._ragged and config == ADAPTIVE)
        return {**auto.runtime((fixed or self._width) - 1), "qspec_ragged": ragged}

    def _learn(self, server: Server, load: Prompts) -> None:
        """Get the answers for the guesses, without drafts, so that QSPEC does not learn them."""
        unknown = [prompt for prompt in load.prompts if prompt not in self._guesses]
        if unknown:
            plain = sampling(0.0, load.max_new_tokens, qspec_enabled=False)
            found = Prompts(tuple(unknown), load.max_new_tokens)
            answers = _ask(server, found, [plain] * len(unknown))
            for prompt, answer in zip(unknown, answers, strict=True):
                self._guesses[prompt] = misleading(answer["output_ids"], self._vocab_size)

    def _custom(self, cell: Cell, prompt: tuple[int, ...]) -> dict[str, Any]:
        """`custom_params` of a request."""
        asked: dict[str, Any] = {}
        if BY_NAME[cell["case"]].sources:
            asked["qspec_sources"] = list(BY_NAME[cell["case"]].sources)
        if cell["case"] == GUESSES:
            asked["qspec_guess_ids"] = self._guesses[prompt]
        return asked


def _ask(server: Server, load: Prompts, asked: list[dict[str, Any]]) -> list[Raw]:
    """The answers to all prompts; the server prefills their common beginning once, before them."""
    if load.shared:
        only = {"input_ids": list(load.prompts[0][: load.shared])}
        server.post("/generate", {**only, "sampling_params": sampling(0.0, 1)})
    body = {"input_ids": list(map(list, load.prompts)), "sampling_params": asked}
    return list(send_batch(server, body, len(load.prompts) * load.max_new_tokens).raw)
