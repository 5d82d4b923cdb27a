"""Decides which texts the connected sidecar can keep and its draft model can read."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.link import Link
from sglang_qspec.messages import MAX_SUBMISSIONS, Welcome


class SidecarLimits:
    """Limits of the sidecar that `link` leads to; before a sidecar has answered there are none.

    Target and draft model have the same tokenizer, but may pad their vocabularies to different
    sizes. The draft model cannot read an id that only the target has.
    """

    def __init__(self, link: Link, vocab_size: int) -> None:
        """`vocab_size` is the target's number of token ids; every text has only ids below it."""
        self._link = link
        self._vocab_size = vocab_size

    @property
    def _sidecar(self) -> Welcome | None:
        return self._link.sidecar

    @property
    def shared_ids(self) -> int:
        """Number of token ids that target and draft model share: the ids below it."""
        sidecar = self._sidecar
        return self._vocab_size if sidecar is None else min(self._vocab_size, sidecar.vocab_size)

    def have_room_for(self, submissions: int, tokens: int) -> bool:
        """Whether the sidecar keeps one submission more, if the texts of all have `tokens`."""
        sidecar = self._sidecar
        return sidecar is None or (
            submissions < MAX_SUBMISSIONS and tokens <= sidecar.max_text_tokens
        )

    def objection(self, live: LiveRequest) -> str | None:
        """Why the draft model cannot read a request's text and one more token; None if it can."""
        sidecar = self._sidecar
        if sidecar is not None and live.text_len >= sidecar.context_len:
            return f"its text of {live.text_len} tokens is too long for the draft model"
        return self.objection_to(live.prompt_ids) or self.objection_to(live.output_ids)

    def objection_to(self, token_ids: Sequence[int]) -> str | None:
        """Why the draft model cannot read these tokens of a text; None if it can."""
        shared = self.shared_ids
        if shared == self._vocab_size:
            return None
        highest = max(token_ids, default=0)
        if highest < shared:
            return None
        return f"its text has token id {highest}, but the draft model has only ids below {shared}"
