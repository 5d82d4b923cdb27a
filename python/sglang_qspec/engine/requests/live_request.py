"""The state of a live request, and the results of its speculation."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from sglang_qspec.controls import Controls
from sglang_qspec.engine.requests.drafting import Drafting
from sglang_qspec.messages import (
    MAX_COMMIT_TOKENS,
    MAX_STOP_TOKENS,
    MIN_TEMPERATURE,
    Commit,
    SeededSampling,
    Submit,
)
from sglang_qspec.policy import Credit, passes_left
from sglang_qspec.trie import RequestTrie, Source


@dataclass
class Tally:
    """Results of speculation for one request. Counts are tokens; passes are target passes."""

    passes: int = 0
    """Decode and verify passes, without the prefill."""
    proposed: int = 0
    """Draft tokens that passes verified."""
    accepted: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    """Accepted draft tokens by source."""
    latest: list[Source] = field(default_factory=list)
    """Sources of the draft tokens that the latest pass accepted, in order."""
    ran_over: bool = False
    """Whether the target's own token of the latest pass is after the end of the output."""

    def add(self, proposed: int, accepted: list[Source], *, prefill: bool = False) -> None:
        """Count a pass over `proposed` draft tokens, with the sources of the accepted ones.

        A `prefill` does not count as a pass.
        """
        self.passes += not prefill
        self.proposed += proposed
        self.latest = accepted
        for source in accepted:
            self.accepted[source] += 1

    def add_plain(self, passes: int) -> None:
        """Count this number of passes without drafts."""
        self.passes += passes
        self.latest = []

    def clip(self, excess: int) -> list[Source]:
        """Subtract the last `excess` tokens of the latest pass, which follow the end of the output.

        A pass may accept tokens after a stop or the length limit. The target's own token is the
        last of the pass. Returns the sources of the subtracted draft tokens.
        """
        if excess <= 0:
            return []
        self.ran_over = True
        kept = len(self.latest) - (excess - 1)
        behind = self.latest[max(0, kept) :]
        for source in behind:
            self.accepted[source] -= 1
        return behind

    def record(self) -> dict[str, Any]:
        """For `meta_info["qspec"]`. `accept_length` includes the target's own tokens."""
        accepted = sum(self.accepted.values())
        gained = self.passes + accepted - self.ran_over
        return {
            "proposed_tokens": self.proposed,
            "accepted_tokens": accepted,
            "accept_length": gained / self.passes if self.passes else 0.0,
            "passes": self.passes,
            "accepted_by_source": {
                source.name.lower(): count for source, count in self.accepted.items()
            },
        }


@dataclass
class LiveRequest:
    """A request from its entry into the waiting queue to its end."""

    rid: str
    trie: RequestTrie
    controls: Controls
    rank: tuple[int, int]
    prompt_ids: list[int]
    output_ids: list[int]
    """Committed output tokens."""
    max_new_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    queued_at: float | None
    """Time of entry into the queue in seconds of the speculator's clock; None after the first
    draft."""
    waits: bool = True
    """Whether the request is in SGLang's waiting queue."""
    drafting: Drafting = field(default_factory=Drafting)
    """State of the request at the sidecar."""
    seeded: SeededSampling | None = None
    """Sampling seed and filters of the request; None for a greedy request."""
    scope: Hashable = None
    """LoRA adapter and cache keys of the request (`scopes.scope_of`); None without them."""
    credit: Credit = field(default_factory=Credit)
    """Reliability of the request's draft scores."""
    tally: Tally = field(default_factory=Tally)

    @property
    def wants_candidates(self) -> bool:
        """Whether the target accepts its step drafts by rejection sampling."""
        return self.seeded is not None and self.seeded.probabilities

    @property
    def tokens_left(self) -> int:
        """Largest number of output tokens to come."""
        return max(0, self.max_new_tokens - len(self.output_ids))

    @property
    def passes_left(self) -> float:
        """Expected number of passes to come."""
        accepted = sum(self.tally.accepted.values())
        return passes_left(self.tokens_left, len(self.output_ids), accepted)

    @property
    def text_len(self) -> int:
        """Number of tokens of prompt and committed output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def longest_draft(self) -> int:
        """Maximum useful length of a draft after the committed output, in tokens."""
        remaining = self.max_new_tokens - len(self.output_ids)
        return min(remaining, self.controls.max_completion_tokens)

    def match_ids(self, paused: Collection[Source]) -> list[int]:
        """The last committed tokens that the trie's longest match has (`longest_match`)."""
        length = self.trie.longest_match(paused)
        return (self.prompt_ids[-length:] + self.output_ids[-length:])[-length:] if length else []

    def submit(self, number: int, *, completions: int, vocab_size: int, scope: int = 0) -> Submit:
        """The message that asks for this number of completions, and for step drafts.

        `scope` is the number of the request's scope (`Scopes`).
        `vocab_size` is the number of token ids that can be drafted. Stop tokens beyond it cannot
        occur in a draft, so the message omits them.
        """
        temperature = self.controls.temperature
        stops = [token for token in self.stop_token_ids if 0 <= token < vocab_size]
        return Submit(
            submission=number,
            token_ids=self.prompt_ids + self.output_ids,
            base_len=len(self.output_ids),
            max_new_tokens=self.longest_draft,
            completions=completions,
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            stop_token_ids=stops[:MAX_STOP_TOKENS],
            ignore_eos=self.ignore_eos,
            top_p=self.controls.top_p,
            greedy_first=self.controls.greedy_first,
            rank=self.rank,
            seeded=self.seeded,
            scope=scope,
        )

    def commit_since(self, number: int, output_len: int, wanted: int) -> Commit:
        """The message that reports the output from `output_len` on, and asks for `wanted` tokens.

        It has at most `MAX_COMMIT_TOKENS` tokens; the next message has the rest.
        """
        return Commit(
            submission=number,
            base_len=output_len,
            token_ids=self.output_ids[output_len : output_len + MAX_COMMIT_TOKENS],
            max_new_tokens=wanted,
        )


def sources_of(wanted: Controls) -> frozenset[Source]:
    """Draft sources that the controls allow."""
    return frozenset(source for source in Source if source.name.lower() in wanted.sources)
