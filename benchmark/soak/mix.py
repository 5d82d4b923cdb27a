"""Draws the random sequence of requests of a soak: their bodies, their rids, and their ends."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from benchmark.soak.answers import Answer
from benchmark.soak.templates import PATHS, Template, unseeded

LONG_RID = 5000
"""Length of a long rid, in characters."""
KEPT_RIDS = 64
"""Number of rids of ended requests, which later requests may get."""
WORDS = ("wrong", "guesses", "resemble", "the", "answer", "but", "are", "none", "of", "it")


class Fate(Enum):
    """The planned end of a request."""

    FINISH = "finish"
    HANG_UP = "hang up"
    """The client closes the connection."""
    ABORT = "abort"
    """The client calls /abort_request."""
    BAD = "bad"
    """The server must refuse the request with HTTP 400."""


@dataclass(frozen=True)
class Request:
    """One request of the soak."""

    number: int
    template: Template
    body: dict[str, Any]
    """HTTP body, with rid, guesses, controls and `stream`."""
    fate: Fate = Fate.FINISH
    after_s: float | None = None
    """Seconds until the hang-up or the abort; None for no hang-up or abort, or `after_pieces`."""
    after_pieces: int | None = None
    """Number of pieces of a stream until the hang-up; None if the time decides."""
    kinds: tuple[str, ...] = ()
    """Properties of the request, for the counts."""

    @property
    def rid(self) -> str | None:
        rid: str | None = self.body.get("rid")
        return rid


@dataclass
class Mix:
    """An endless sequence of requests; seed and order of endings determine it.

    `references` are the answers to the templates, by number; the mix makes right guesses from them.
    """

    seed: int
    templates: Sequence[Template]
    references: Mapping[int, Answer]
    counts: Counter[str] = field(default_factory=Counter)
    """Number of requests by property."""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._number = 0
        self._over: deque[str] = deque(maxlen=KEPT_RIDS)

    def next(self) -> Request:
        """The next request to send."""
        rng = self._rng
        self._number += 1
        chance = rng.random()
        if chance < 0.04:
            request = self._bad()
        else:
            known = rng.random() < 0.75
            request = self._good(rng.choice(self.templates) if known else unseeded(rng))
        self.counts.update(request.kinds)
        return request

    def end(self, request: Request) -> None:
        """Release the rid of a request that ended by itself.

        A stream keeps its rid, because SGLang aborts that rid 2 s after the end of a stream.
        """
        streamed = request.body.get("stream", False)
        if request.rid is not None and request.fate is Fate.FINISH and not streamed:
            self._over.append(request.rid)

    def _good(self, template: Template) -> Request:
        rng = self._rng
        kinds = [template.path, _sampling_kind(template)]
        fate, after_s, after_pieces = self._fate()
        custom: dict[str, Any] = {}
        text = self._guess(template, custom, kinds)
        if rng.random() < 0.2:
            custom.update(rng.choice(CONTROLS))
            kinds.append("controls")
        more: dict[str, Any] = {}
        if rng.random() < 0.45:
            more["stream"] = True
            kinds.append("stream")
        rid = self._rid(fate, kinds)
        if rid is not None:
            more["rid"] = rid
        kinds += [name for name in ("n", "stop", "ignore_eos") if name in template.sampling]
        if after_pieces is not None and "stream" not in more:
            # Only a stream has pieces.
            after_pieces, after_s = None, 1.0
        body = template.body(text, custom, **more)
        end = (fate, after_s, after_pieces)
        return Request(self._number, template, body, *end, tuple(kinds))

    def _fate(self) -> tuple[Fate, float | None, int | None]:
        """The fate, and the seconds or the pieces until a request is cut."""
        rng = self._rng
        chance = rng.random()
        # From milliseconds (before the prefill) to seconds (some requests have ended by that time).
        after = 10 ** rng.uniform(-2.0, 1.2)
        if chance < 0.12:
            return Fate.HANG_UP, after, None
        if chance < 0.18:
            return Fate.HANG_UP, None, rng.randint(1, 12)
        if chance < 0.30:
            return Fate.ABORT, after, None
        return Fate.FINISH, None, None

    def _guess(self, template: Template, custom: dict[str, Any], kinds: list[str]) -> str:
        """The prompt; adds right or wrong guesses, or none, to the prompt or to `custom`."""
        rng = self._rng
        text = template.text
        if rng.random() > 0.35:
            return text
        reference = None if template.number is None else self.references.get(template.number)
        right = reference is not None and rng.random() < 0.5
        guess = reference.parts[0].text if reference is not None and right else ""
        if not guess.strip():
            guess, right = " ".join(rng.choices(WORDS, k=rng.randint(1, 30))), False
        kinds.append("right guess" if right else "wrong guess")
        way = rng.choice(("tag", "texts", "ids"))
        kinds.append(f"guess by {way}")
        if way == "texts":
            custom["qspec_guesses"] = rng.choice((guess, [guess], [guess, "another one"]))
            return text
        if way == "ids":
            ids = reference.parts[0].output_ids if reference is not None and right else None
            wrong = [rng.randrange(1000, 40000) for _ in range(rng.randint(1, 40))]
            # One flat list, or several with null between them.
            custom["qspec_guess_ids"] = [*(ids or wrong), *rng.choice(([], [None, *wrong]))]
            return text
        place = rng.randint(0, len(text))
        return text[:place] + f"<NGRAMGUESS>{guess}</NGRAMGUESS>" + text[place:]

    def _rid(self, fate: Fate, kinds: list[str]) -> str | None:
        """A rid. SGLang aborts every rid with the given prefix, so each rid ends with a dot."""
        rng = self._rng
        chance = rng.random()
        name = f"soak-{self._number}."
        if fate is Fate.FINISH and chance < 0.3:
            return None
        if chance < 0.4 and fate is Fate.FINISH and self._over:
            kinds.append("repeated rid")
            return self._over.popleft()
        if chance < 0.5:
            kinds.append("long rid")
            return "r" * (LONG_RID - len(name)) + name
        if chance < 0.6:
            kinds.append("unicode rid")
            return f"Жаба-蛙-🐸-\u202e{name}"
        if chance < 0.65:
            kinds.append("odd rid")
            return rng.choice(("'; --", "{}", '"\\', " \n\t", "../..", "%00%s", "\x00")) + name
        return name

    def _bad(self) -> Request:
        rng = self._rng
        path = rng.choice(PATHS)
        name, text, sampling, custom = rng.choice(BAD)
        template = Template(path, text, {"temperature": 0, "max_new_tokens": 8, **sampling})
        more = {"stream": True} if rng.random() < 0.3 else {}
        body = template.body(text, custom, **more)
        return Request(self._number, template, body, Fate.BAD, kinds=("bad", f"bad: {name}"))


def _sampling_kind(template: Template) -> str:
    if template.greedy:
        return "greedy"
    return "seeded" if "sampling_seed" in template.sampling else "sampled"


CONTROLS: tuple[dict[str, Any], ...] = (
    {"qspec_enabled": False},
    {"qspec_completions": 1},
    {"qspec_completions": 2, "qspec_sources": ["queue", "prompt"]},
    {"qspec_sources": ["step"]},
    {"qspec_sources": ["guess", "output"]},
    {"qspec_draft_token_num": 1},
    {"qspec_draft_token_num": 3},
    {"qspec_max_completion_tokens": 8},
    {"qspec_greedy_first": False, "qspec_temperature": 0.3},
    {"qspec_return_provenance": True},
    {"qspec_return_trace": True},
)
"""`custom_params` that change no answer."""
BAD: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("open tag", "a <NGRAMGUESS>b", {}, {}),
    ("closing tag", "a </NGRAMGUESS>b", {}, {}),
    ("blank guess", "a <NGRAMGUESS> </NGRAMGUESS>b", {}, {}),
    ("guess ids", "a", {}, {"qspec_guess_ids": [1.5]}),
    ("guess texts", "a", {}, {"qspec_guesses": [" "]}),
    ("unknown control", "a", {}, {"qspec_colour": 1}),
    ("control out of range", "a", {}, {"qspec_completions": 1000}),
    ("temperature", "a", {"temperature": -1.0}, {}),
    ("top_p", "a", {"top_p": 2.0}, {}),
    ("max_new_tokens", "a", {"max_new_tokens": -5}, {}),
    ("long prompt", "word " * 4000, {}, {}),
)
"""Name of the error, prompt, parameters and custom_params; the server answers each with 400."""
