"""Measures the tables of `qspec plan` on a running server with a sidecar."""

from __future__ import annotations

import contextlib
import itertools
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_qspec import __version__
from sglang_qspec.config import MODES
from sglang_qspec.draft_source import SOURCES
from sglang_qspec.errors import ClientError, shown
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.measure import pass_timer
from sglang_qspec.tools.measure.agreement import judged, matching_again
from sglang_qspec.tools.measure.pass_timer import PassTimer, in_turn
from sglang_qspec.tools.measure.tables import (
    VERSION,
    Agreement,
    Draft,
    Gpus,
    Prefill,
    Tables,
    Verify,
)

HEARTBEAT_S = 1.5
"""Wait for the sidecar's counters, which it sends about once a second."""
PROMPT_TOKENS = (16, 512)
"""Lengths of the prompts whose times give the time of a prompt token."""
STEP_REPEATS = 2
"""Measurements of draft steps."""
FEW_TOKENS, STEP_TOKENS = 8, 56
"""Output tokens of each request while draft steps are measured."""
FULL = 0.8
"""Mean batch size, as a share of the requests, below which the server cannot run them at once."""
FEWEST = 64
"""Compared tokens below which the agreement of queue drafts is left out."""


class _Steps(NamedTuple):
    """Draft steps while a number of requests was served."""

    step: Draft
    """A step without reading."""
    beside: float
    """Seconds of a target pass meanwhile."""
    reading: float
    """Seconds in which the draft model read the prompts."""
    prompt: int
    """Tokens of the prompts."""


class Measurement(PassTimer):
    """One measurement of a running server; its methods raise ClientError if the server refuses."""

    def __init__(self, url: str, texts: Sequence[str], tokens: int) -> None:
        super().__init__(Client(url))
        self._texts, self._tokens = texts, tokens

    def tables(
        self,
        requests: Sequence[int],
        *,
        machine: str = "",
        draft: str = "unnamed",
        gpus: tuple[int, int] = (1, 1),
    ) -> Tables:
        """Measure everything.

        Raises ClientError if the server has several schedulers or no sidecar, or if nothing was
        drafted.
        """
        model, (state, *others) = self._client.info()
        if others:
            raise ClientError(
                f"{self._client.url} has {1 + len(others)} schedulers, but must have one: measure "
                "a server without --dp-size"
            )
        if state["sidecar"] != "ready":
            raise ClientError(
                f"the sidecar of {self._client.url} is {shown(state['sidecar'])}, but must be "
                "'ready'"
            )
        prompts = [self._client.chat_ids(text) for text in self._texts]
        widest = int(state["settings"]["draft_token_num"])
        widths = [width for width in (1, 2, 4, 8, 16, 32, 64) if width < widest] + [widest]
        with self._restoring(state["settings"]):
            # A step pipeline keeps the CPUs of the sidecar its own.
            self._prepare(state["settings"], mode="ahead", sources=())
            self._check_batch(prompts, max(requests))
            verify = self.pass_seconds(prompts, list(itertools.product(requests, widths)))
            prefill = self._prefill(prompts)
            self._prepare(state["settings"], mode="ahead", sources=("step",))
            self.set(draft_token_num=widest, fixed_width=1)
            found = self._steps_by_requests(prompts, requests)
            self._prepare(state["settings"], mode="sequential", sources=("step",))
            agreement: dict[str, Agreement] = {"step": judged(self._passes(prompts, "step"))[0]}
            if not agreement["step"]:
                raise ClientError("the sidecar drafted nothing for the prompts")
            self._prepare(state["settings"], mode="queue", sources=("queue",))
            # Enough prompts that some wait.
            many = in_turn(prompts, 3 * max(requests) + len(prompts))
            answers, drafted, wide = judged(self._passes(many, "queue"))
        again = 0.5
        if sum(map(len, answers)) >= FEWEST:
            agreement["queue"] = answers
            again = matching_again(answers, drafted, wide)
        slower = [each.beside / verify[b, widest] for b, each in zip(requests, found, strict=True)]
        reading = sum(each.reading for each in found) / sum(each.prompt for each in found)
        return Tables(
            version=VERSION,
            source="measured",
            machine=machine or platform.node() or "unnamed",
            target=model,
            draft=draft,
            # A GPU runs few passes without a graph, and a CPU all of them.
            on_gpu=2 * self._client.state()["eager_passes"] < self.counters()[0],
            verify=[Verify(b, width, each) for (b, width), each in verify.items()],
            prefill=prefill,
            draft_steps=[each.step for each in found],
            draft_prefill_token=reading,
            agreement=agreement,  # type: ignore[arg-type]
            again=again,
            slowdown=max(1.0, statistics.median(slower)),
            gpus=Gpus(*gpus),
            conditions={
                "qspec": __version__,
                "prompts": str(len(prompts)),
                "tokens": str(self._tokens),
            },
        )

    @contextlib.contextmanager
    def _restoring(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Restore the server's runtime settings at the end."""
        before = dict(settings)
        try:
            yield
        finally:
            self.set(**{n: MODES.index(v) if n == "mode" else int(v) for n, v in before.items()})

    def _prepare(self, settings: Mapping[str, Any], *, mode: str, sources: Sequence[str]) -> None:
        """Set the mode and the draft sources; a pass has one width."""
        values = {f"source_{source}": int(source in sources) for source in SOURCES}
        if settings["ragged"]:
            values["ragged"] = 0
        self.set(mode=MODES.index(mode), enabled=1, **values)

    def _check_batch(self, prompts: Sequence[list[int]], requests: int) -> None:
        """Raise ClientError unless the server runs this number of requests at once."""

        def totals() -> tuple[float, float]:
            pipelines: Any = self._client.state()["pipelines"].values()
            return sum(p["passes"] for p in pipelines), sum(p["requests"] for p in pipelines)

        before = totals()
        self.generate(in_turn(prompts, requests), 8)
        passes, served = (now - then for now, then in zip(totals(), before, strict=True))
        batch = served / max(1.0, passes)
        if batch < FULL * requests:
            raise ClientError(
                f"--requests is {requests}, but the server runs {batch:.1f} requests at once; it "
                "must run all of them, so start it with more --max-running-requests"
            )

    def _prefill(self, prompts: Sequence[list[int]]) -> Prefill:
        """The time of a pass over a prompt, from two lengths."""
        # No prompt begins like this, so the cache has no part of it.
        text = itertools.cycle(list(itertools.chain.from_iterable(prompts))[::-1])
        times = []
        for length in PROMPT_TOKENS:
            ids = list(itertools.islice(text, length))
            seconds = []
            for _ in range(pass_timer.REPEATS):
                with contextlib.suppress(ClientError):  # the answer is a text, not JSON
                    self._client.post("/flush_cache", {})
                began = time.monotonic()
                self.generate([ids], 1)
                seconds.append(time.monotonic() - began)
            times.append(statistics.median(seconds))
        short, long = PROMPT_TOKENS
        token = max(0.0, times[1] - times[0]) / (long - short)
        return Prefill(max(0.0, times[0] - short * token), token)

    def _steps_by_requests(
        self, prompts: Sequence[list[int]], requests: Sequence[int]
    ) -> list[_Steps]:
        """The fastest draft steps of several rounds, by requests."""
        rounds = [[self._steps(prompts, b) for b in requests] for _ in range(STEP_REPEATS)]
        return [min(each, key=lambda one: one.step.seconds) for each in zip(*rounds, strict=True)]

    def _steps(self, prompts: Sequence[list[int]], requests: int) -> _Steps:
        """Measure draft steps while `requests` are served.

        Short answers take as much reading as long ones. So the difference of both has the steps
        alone, and the rest of the short ones is the reading.
        """
        texts = in_turn(prompts, requests)
        self.generate(texts, FEW_TOKENS)
        before = self._step_counts()
        self.generate(texts, FEW_TOKENS)
        middle = self._step_counts()
        passes = self.counters()
        self.generate(texts, STEP_TOKENS)
        later = self.counters()
        after = self._step_counts()
        short = [now - then for now, then in zip(middle, before, strict=True)]
        whole = [now - then for now, then in zip(after, middle, strict=True)]
        steps, tokens, seconds = (b - a for a, b in zip(short, whole, strict=True))
        if steps <= 0 or tokens <= 0 or seconds <= 0:
            raise ClientError("the sidecar drafted nothing while the server served the prompts")
        reading = max(0.0, short[2] - short[0] * seconds / steps)
        each = (later[1] - passes[1]) / max(1.0, later[0] - passes[0])
        # A step extends each draft once; differences of counts may say a little more.
        rows = min(float(requests), max(1.0, tokens / steps))
        return _Steps(Draft(rows, seconds / steps), each, reading, sum(map(len, texts)))

    def _step_counts(self) -> list[float]:
        """Passes, tokens and seconds of draft steps so far."""
        time.sleep(HEARTBEAT_S)
        state = self._client.state()
        return [state[name] for name in ("step_passes", "step_tokens", "step_seconds")]

    def _passes(self, prompts: Sequence[list[int]], source: str) -> list[list[dict[str, Any]]]:
        """The trace of each prompt's greedy answer, with drafts of one source."""
        params = {
            "temperature": 0.0,
            "max_new_tokens": self._tokens,
            "custom_params": {"qspec_sources": [source], "qspec_return_trace": True},
        }
        body = {"input_ids": list(prompts), "sampling_params": params}
        answers = self._client.post("/generate", body)
        return [answer["meta_info"]["qspec_trace"]["passes"] for answer in answers]
