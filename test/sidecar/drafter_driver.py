"""A drafter under test, and the drafts that its requests receive."""

from collections import defaultdict
from typing import Any

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Admit,
    Close,
    Commit,
    Commits,
    Declined,
    Drafted,
    Gap,
    SeededSampling,
    Submit,
)
from sglang_qspec.sidecar.drafter import Drafter
from test.sidecar.scripted import ScriptedModel

ONE, TWO = Peer("one", b"1"), Peer("two", b"2")


class DrafterDriver:
    """Drives a drafter and collects the messages for each request."""

    def __init__(self, model: ScriptedModel, **options: Any) -> None:
        self.model = model
        self._names: list[str] = []
        """Names of requests; the index of a name is its submission number."""
        self.declined: dict[str, str] = {}
        """Reason for which each declined request was declined."""
        self.gaps: list[tuple[str, int | None]] = []
        """One entry per Gap: the request, and the known output length or None."""
        self.drafter = Drafter(model, **options)
        self.told: dict[tuple[Peer, str, int], list[int]] = defaultdict(list)
        self.seconds: dict[tuple[Peer, str, int], list[int]] = defaultdict(list)
        """Second choices for the tokens in `told`."""
        self.finished: list[tuple[Peer, str, int]] = []
        self.base_lens: dict[str, int] = {}
        self.bases: dict[tuple[Peer, str, int], int] = {}
        self.rests: dict[str, int] = {}
        """Output length at which the drafter last reported a request's step draft as complete."""

    def number(self, rid: str) -> int:
        """The submission number of a request."""
        if rid not in self._names:
            self._names.append(rid)
        return self._names.index(rid)

    def submit(
        self,
        rid: str,
        token_ids: list[int],
        *,
        peer: Peer = ONE,
        completions: int = 3,
        max_new_tokens: int = 10,
        base_len: int = 0,
        stop: list[int] | None = None,
        ignore_eos: bool = False,
        greedy_first: bool = True,
        rank: tuple[int, int] = (0, 0),
        seeded: SeededSampling | None = None,
        scope: int = 0,
    ) -> None:
        self.drafter.submit(
            peer,
            Submit(
                self.number(rid),
                token_ids,
                base_len,
                max_new_tokens,
                completions,
                0.6,
                stop or [],
                ignore_eos,
                greedy_first=greedy_first,
                rank=rank,
                seeded=seeded,
                scope=scope,
            ),
        )
        self.collect()

    def commit(
        self, rid: str, base_len: int, token_ids: list[int], max_new_tokens: int = 10
    ) -> None:
        commit = Commit(self.number(rid), base_len, token_ids, max_new_tokens)
        self.drafter.follow(ONE, Commits([commit]))
        self.drafter.check_integrity()
        self.collect()

    def admit(self, rid: str, peer: Peer = ONE) -> None:
        self.drafter.admit(peer, Admit(self.number(rid)))
        self.drafter.check_integrity()

    def close(self, rid: str, peer: Peer = ONE) -> None:
        self.drafter.close(peer, Close(self.number(rid)))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.drafter.step()
            self.drafter.check_integrity()
            self.collect()

    def run(self) -> None:
        for _ in range(2000):
            if self.drafter.idle:
                return
            self.step()
        raise AssertionError("the drafter does not come to an end")

    def collect(self) -> None:
        for peer, message in self.drafter.take():
            if isinstance(message, Drafted):
                self._note(peer, message)
            elif isinstance(message, Declined):
                self.declined[self._names[message.submission]] = message.reason
            elif isinstance(message, Gap):
                self.gaps.append((self._names[message.submission], message.known_len))

    def _note(self, peer: Peer, drafted: Drafted) -> None:
        rid = self._names[drafted.submission]
        if drafted.completion >= MAX_COMPLETIONS and drafted.finished:
            self.rests[rid] = drafted.known_len
            if not drafted.token_ids:
                return
        name = (peer, rid, drafted.completion)
        assert drafted.start == len(self.told[name]), "a gap, or tokens sent twice"
        rests = drafted.completion >= MAX_COMPLETIONS  # a step draft can continue
        assert rests or name not in self.finished, "drafted after it was finished"
        assert drafted.token_ids or drafted.finished, "a message without content"
        self.told[name] += drafted.token_ids
        assert len(drafted.second_ids) in (0, len(drafted.token_ids))
        self.seconds[name] += drafted.second_ids
        self.base_lens[rid] = drafted.base_len
        assert self.bases.setdefault(name, drafted.base_len) == drafted.base_len
        if drafted.finished:
            self.finished.append(name)

    def leave(self, *rids: str) -> None:
        """Close all requests, and check that the drafter keeps nothing of them."""
        for rid in rids:
            self.close(rid)
        self.drafter.drop(TWO)
        self.drafter.check_integrity()
        assert self.model.rows.free_slots == self.model.rows.total_slots
        assert self.drafter.idle
        assert self.drafter.requests == 0
