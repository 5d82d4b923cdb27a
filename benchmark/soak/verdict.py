"""Judges ended requests: whether they ended as planned, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from benchmark.soak.answers import ABORT, Answer, Part, streamed, whole
from benchmark.soak.asking import Response
from benchmark.soak.mix import Fate, Request

SHOWN = 600
"""Maximum length of a message, in characters."""
AROUND = 40
"""Characters or tokens shown on each side of a difference."""


class Kind(Enum):
    """The end of a request. The first three are right, the last two are violations."""

    WHOLE = "whole"
    CUT = "cut"
    """Aborted, or the client hung up, as planned."""
    REFUSED = "refused"
    """A bad request that the server refused, as planned."""
    FAILED = "failed"
    CHANGED = "changed"


@dataclass(frozen=True)
class Verdict:
    """The end of a request; `reason` is empty unless it is a violation."""

    kind: Kind
    reason: str = ""

    @property
    def violated(self) -> bool:
        return self.kind in (Kind.FAILED, Kind.CHANGED)


def judge(request: Request, response: Response, reference: Answer | None) -> Verdict:
    """Compare the response of `request` with its plan, and its answer with `reference`.

    `reference` is None for a request whose answer varies. If a request was cut on purpose, a part
    of an answer must be the beginning of the reference; a whole answer is judged as any other.
    """
    cut = request.fate in (Fate.HANG_UP, Fate.ABORT)
    if request.fate is Fate.BAD:
        if response.status == 400:
            return Verdict(Kind.REFUSED)
        return _failed(f"HTTP {response.status} instead of 400: {response.error or response.data}")
    if response.status is not None and response.status != 200:
        told = str(response.error or response.data)
        # SGLang answers an aborted request with a 4xx or 503 that contains "abort".
        if request.fate is Fate.ABORT and response.status in _ABORTED and "abort" in told.lower():
            return Verdict(Kind.CUT)
        return _failed(f"HTTP {response.status}: {told}")
    if response.error is not None:
        return _failed(response.error)
    if response.hung_up and not (response.streamed and response.data):
        return Verdict(Kind.CUT)
    path = request.template.path
    try:
        answer = (streamed if response.streamed else whole)(path, response.data)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        return _failed(f"no answer of {path} ({error!r}): {response.data}")
    if response.hung_up or (cut and any(part.reason == ABORT for part in answer.parts)):
        wrong = begins(answer, reference) if reference is not None else ""
        return Verdict(Kind.CHANGED, wrong) if wrong else Verdict(Kind.CUT)
    wrong = malformed(request, answer)
    if wrong:
        return _failed(wrong)
    wrong = differs(answer, reference) if reference is not None else ""
    return Verdict(Kind.CHANGED, wrong) if wrong else Verdict(Kind.WHOLE)


def malformed(request: Request, answer: Answer) -> str:
    """The first property of a whole answer, besides its text, that contradicts its request.

    Empty if no property does.
    """
    sampling, template = request.template.sampling, request.template
    most = sampling["max_new_tokens"]
    if len(answer.parts) != template.answers:
        return f"{len(answer.parts)} answers instead of {template.answers}"
    for part in answer.parts:
        if part.reason not in ("stop", "length"):
            return f"the answer ended with {part.reason!r}"
        if sampling.get("ignore_eos") and part.reason != "length":
            return f"the answer ended with {part.reason!r} in spite of ignore_eos"
        if part.output_ids is not None and len(part.output_ids) > most:
            return f"{len(part.output_ids)} tokens instead of at most {most}"
    tokens = answer.completion_tokens
    if tokens is None or answer.prompt_tokens is None:
        return "the answer has no token counts"
    if tokens > most * template.answers:
        return f"the server counts {tokens} tokens instead of at most {most} per answer"
    if all(part.output_ids is not None for part in answer.parts):
        counted = sum(len(part.output_ids or ()) for part in answer.parts)
        if counted != tokens:
            return f"the server counts {tokens} tokens instead of {counted}"
    return ""


def differs(answer: Answer, reference: Answer) -> str:
    """The first difference of a whole answer from the reference; empty if they are equal."""
    for number, (part, own) in enumerate(zip(answer.parts, reference.parts, strict=True)):
        if part != own:
            return f"answer {number} {_unlike(part, own)}"
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(answer, name) != getattr(reference, name):
            return f"{name}: {getattr(answer, name)} instead of {getattr(reference, name)}"
    return ""


def begins(answer: Answer, reference: Answer) -> str:
    """The first difference of a cut answer from the beginning of the reference; empty without one.

    Compares tokens, or texts without tokens. A text may hold the first characters of a stop string,
    which the reference lacks, so characters beyond its end are no difference.
    """
    for number, (part, own) in enumerate(zip(answer.parts, reference.parts, strict=False)):
        if part.output_ids is not None and own.output_ids is not None:
            same = own.output_ids[: len(part.output_ids)] == part.output_ids
        elif own.reason == "stop" and own.matched is not None:
            length = min(len(part.text), len(own.text))
            same = part.text[:length] == own.text[:length]
        else:
            same = own.text.startswith(part.text)
        if not same:
            return f"answer {number}, which was cut, {_unlike(part, own)}"
    return ""


_ABORTED = (400, 499, 503)


def _failed(reason: str) -> Verdict:
    return Verdict(Kind.FAILED, reason if len(reason) <= SHOWN else reason[:SHOWN] + "...")


def _unlike(part: Part, own: Part) -> str:
    """The first difference of a part: of its text, then of its tokens, then of its end."""
    names = ("text", "output_ids")
    for name in names:
        found, right = getattr(part, name) or (), getattr(own, name) or ()
        if found != right:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(found, right, strict=False))
            place = len(list(same))
            ends = slice(max(0, place - AROUND), place + AROUND)
            return f"differs in {name} from {place} on: {found[ends]!r} instead of {right[ends]!r}"
    return f"ended with {part.reason}, {part.matched!r} instead of {own.reason}, {own.matched!r}"
