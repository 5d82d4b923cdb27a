"""The largest accept length that drafts from known texts can give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def largest_accept_length(
    answers: Iterable[tuple[str, str]], encode: Callable[[str], Sequence[int]]
) -> float:
    """Output tokens of a pass over all answers, each with the fewest passes.

    `answers` has each answer and the text to draft from; `encode` gives the token ids of a text.
    The prefill gives the first token of an answer. Answers of one token have no pass.
    """
    passes = tokens = 0
    for text, other in answers:
        answer = encode(text)[1:]
        tokens += len(answer)
        passes += fewest_passes(answer, encode(other))
    return tokens / max(1, passes)


def fewest_passes(answer: Sequence[int], other: Sequence[int]) -> int:
    """The smallest number of passes for `answer` if each drafts a part of a known text.

    The known texts are `other` and the answer so far, as token ids. Each pass drafts the part that
    is right for the most tokens, as only a drafter could that knew the answer, and gives one more
    token. No other choice of parts takes fewer passes, because each end of a part is a part too.
    """
    passes = done = 0
    while done < len(answer):
        left, known = answer[done:], [*other, *answer[:done]]
        done += 1 + max((_common(left, known[place:]) for place in range(len(known))), default=0)
        passes += 1
    return passes


def _common(text: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(text), len(other)))
