"""The random row of requests of a soak: what each asks, its rid, and how it is to end."""

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
"""Characters."""
KEPT_RIDS = 64
"""Names of requests that are over, which others may get again."""
WORDS = ("wrong", "guesses", "resemble", "the", "answer", "but", "are", "none", "of", "it")


class Fate(Enum):
    """How a request is to end."""

    FINISH = "finish"
    HANG_UP = "hang up"
    """The client closes the connection."""
    ABORT = "abort"
    """The client calls /abort_request."""
    BAD = "bad"
    """The server must refuse it with HTTP 400."""


@dataclass(frozen=True)
class Request:
    """One request of the soak."""

    number: int
    template: Template
    body: dict[str, Any]
    """Body that is sent, with rid, guesses, controls and `stream`."""
    fate: Fate = Fate.FINISH
    after_s: float | None = None
    """When its client hangs up, or it is aborted; None otherwise."""
    after_pieces: int | None = None
    """Hang up after this many pieces of a stream; None to go by time, if at all."""
    kinds: tuple[str, ...] = ()
    """Properties of the request that are counted."""

    @property
    def rid(self) -> str | None:
        rid: str | None = self.body.get("rid")
        return rid


@dataclass
class Mix:
    """An endless row of requests, the same for the same seed and endings.

    `references` are the answers to the templates, by number; right guesses are made of them.
    """

    seed: int
    templates: Sequence[Template]
    references: Mapping[int, Answer]
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by what was special about them."""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._number = 0
        self._over: deque[str] = deque(maxlen=KEPT_RIDS)

    def next(self) -> Request:
        """The next request to be sent."""
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
        """A request has ended by itself: its name may be given again.

        Not that of a stream: SGLang aborts the name 2 s after a stream has ended.
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
        if after_pieces is not None:
            # Only a stream has pieces.
            after_pieces, after_s = (after_pieces, None) if "stream" in more else (None, 1.0)
        return Request(
            self._number,
            template,
            template.body(text, custom, **more),
            fate,
            after_s,
            after_pieces,
            tuple(kinds),
        )

    def _fate(self) -> tuple[Fate, float | None, int | None]:
        """The fate, and the seconds or the pieces after which a request is cut."""
        rng = self._rng
        chance = rng.random()
        # From milliseconds, before the prompt is read, to seconds, when some have ended.
        after = 10 ** rng.uniform(-2.0, 1.2)
        if chance < 0.12:
            return Fate.HANG_UP, after, None
        if chance < 0.18:
            return Fate.HANG_UP, None, rng.randint(1, 12)
        if chance < 0.30:
            return Fate.ABORT, after, None
        return Fate.FINISH, None, None

    def _guess(self, template: Template, custom: dict[str, Any], kinds: list[str]) -> str:
        """The prompt, with guesses in it or in `custom`, right ones or wrong ones, or with none."""
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
        """A name. SGLang aborts all requests that begin with a name, so each ends with a dot."""
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
        template = Template(
            rng.choice(PATHS), "A bad request.", {"temperature": 0, "max_new_tokens": 8}
        )
        name, text, sampling, custom = rng.choice(BAD)
        changed = Template(template.path, text, {**template.sampling, **sampling})
        more = {"stream": True} if rng.random() < 0.3 else {}
        body = changed.body(text, custom, **more)
        return Request(self._number, changed, body, Fate.BAD, kinds=("bad", f"bad: {name}"))


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
"""What is wrong, the prompt, parameters and custom_params: each is a 400."""
