"""Finds the text of each output token of a growing answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""Decodes several lists of token ids."""

INCOMPLETE = "\ufffd"
"""The text that a tokenizer decodes from the bytes of an incomplete character."""
LONGEST = 64
"""Maximum number of known tokens that are decoded again with the new ones, and of new ones at a
time."""
MOST = 4096
"""The same maximum while the known tokens end in the middle of a character."""
KEPT = 8
"""Number of known tokens that are decoded again after the window has moved."""


class TokenTexts:
    """Cuts the text of a growing answer into the texts of its tokens.

    A token's text is the text that it adds to all tokens before it, so a character of several
    tokens belongs to the last one. The concatenated texts are always the answer's text. A window
    of the last tokens is decoded with the new ones, so the work does not grow with the answer.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens = 0
        """Number of tokens with all of their text returned."""
        self._end = 0
        """Number of characters of these tokens."""
        self._shown = 0
        """Number of characters already returned, a part of the next token's included."""
        self._start = 0
        """Index of the window's first token."""
        self._offset = 0
        """Number of characters of the answer before the window."""
        self._is_whole = True
        """Whether these tokens end with a whole character."""

    def take(self, text: str, output_ids: Sequence[int]) -> list[str]:
        """The texts of the tokens that are new in an answer; its text may lag behind its tokens.

        If it does, the last of these texts may be incomplete; its token gets the rest later, as
        a further text: `tokens` is the number of tokens with all of their text.
        """
        texts: list[str] = []
        while (end := min(len(output_ids), self._tokens + LONGEST)) > self._tokens:
            texts += self._take(text, output_ids, range(self._tokens + 1, end + 1))
            if self._tokens < end:
                break  # the text lags
        return texts

    def _take(self, text: str, output_ids: Sequence[int], ends: range) -> list[str]:
        """The texts of the tokens before `ends`, which are the next ones."""
        start = self._start
        window = self._tokens - start
        if window > (LONGEST if self._is_whole else MOST):
            start = self._tokens - KEPT
        moves = start != self._start
        known = [output_ids[start : self._tokens]] if moves else []
        decoded = self._decode([*known, *(output_ids[start:end] for end in ends)])
        if moves:
            self._start, self._offset = start, self._end - len(decoded[0])
            decoded = decoded[1:]
        # Some tokenizers drop a space at the start of a text.
        last = decoded[-1].rstrip(INCOMPLETE)
        lead = int(start == 0 and text[:1] == " " and last[:1] not in (" ", ""))
        texts = []
        for end, prefix in zip(ends, decoded, strict=True):
            whole = prefix.rstrip(INCOMPLETE)
            upto = max(self._shown, self._offset + len(whole) + lead)
            texts.append(self._show(text[:upto]))
            if upto > len(text):
                break
            self._tokens, self._end = end, upto
            self._is_whole = len(whole) == len(prefix)
        return texts

    @property
    def tokens(self) -> int:
        """Number of tokens with all of their text returned."""
        return self._tokens

    def finish(self, text: str) -> str:
        """The rest of a complete answer."""
        return self._show(text)

    def _show(self, text: str) -> str:
        fresh = text[self._shown :]
        self._shown += len(fresh)
        return fresh
