"""No token of one request's drafts, guesses or output is ever proposed to another."""

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Drafted, Submit
from sglang_qspec.trie import DraftTree, TrieLimits, TrieStore
from test.engine.speculating import finish_pass

COMMON = range(2)
"""Tokens that all requests use; matching them could lead from one request into another."""
OWN_TOKENS = 6
"""Number of token ids that belong to one request alone."""
MAX_REQUESTS = 60
VOCAB = len(COMMON) + OWN_TOKENS * MAX_REQUESTS
RIDS = ("a", "b", "c")
WIDTH = 6

steps = st.lists(
    st.tuples(
        st.sampled_from(["enqueue", "poll", "pass", "pass", "late", "retract", "end", "restart"]),
        st.sampled_from(RIDS),
        st.integers(0, 2**16),
    ),
    min_size=20,
    max_size=MAX_REQUESTS,
)


def own(number: int) -> range:
    """Token ids that belong to the request `number` alone."""
    return range(len(COMMON) + number * OWN_TOKENS, len(COMMON) + (number + 1) * OWN_TOKENS)


def text(number: int, length: int, rng: random.Random) -> list[int]:
    """A random mix of own and common tokens."""
    return [rng.choice(COMMON if rng.random() < 0.4 else own(number)) for _ in range(length)]


def drafts(submit: Submit) -> Sequence[Sequence[int]]:
    rng = random.Random(submit.submission)
    return [text(number_of(submit.token_ids), 12, rng) for _ in range(submit.completions)]


def number_of(prompt_ids: Sequence[int]) -> int:
    """Number of the request of a prompt; the first token of a prompt is one of its own ids."""
    return (prompt_ids[0] - len(COMMON)) // OWN_TOKENS


class Requests:
    """A scheduler with few rids, each used again and again by new requests."""

    def __init__(self, delay: int, max_total_tokens: int) -> None:
        self.link = FakeSidecarLink(drafts, vocab_size=VOCAB, delay=delay, interval=1, chunk=3)
        limits = TrieLimits(
            vocab_size=VOCAB, max_request_tokens=64, max_total_tokens=max_total_tokens
        )
        config = QSpecConfig(completions=3)
        self.active = Speculator(config, VOCAB, TrieStore(limits), Opened((self.link,)))
        self.requests = 0
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.proposed = 0

    def do(self, action: str, rid: str, seed: int) -> None:
        rng = random.Random(seed)
        if action == "enqueue":
            self.enqueue(rid, rng)
        elif action == "poll":
            self.active.poll()
        elif action == "late":
            self.send_again(rng)
        elif action == "restart":
            self.link.die()
            self.active.poll()
            self.link.revive()
        elif action == "pass":
            self.serve(rng)
        elif rid in self.prompts:
            if action == "retract":
                self.put_in_line(rid, None)
            else:
                self.active.end(rid, len(self.outputs[rid]))
                del self.prompts[rid], self.outputs[rid]

    def send_again(self, rng: random.Random) -> None:
        """A late draft, for any request so far."""
        if not self.link.submits:
            return
        submit = rng.choice(self.link.submits)
        token_ids = list(drafts(submit)[0])
        self.link.inject(Drafted(submit.submission, 0, submit.base_len, 0, token_ids))

    def enqueue(self, rid: str, rng: random.Random) -> None:
        """A new request, perhaps while an earlier one of the same rid is still live."""
        number, self.requests = self.requests, self.requests + 1
        self.prompts[rid] = [rng.choice(own(number)), *text(number, 6, rng)]
        self.outputs[rid] = []
        self.put_in_line(rid, {"qspec_guess_ids": text(number, 6, rng)})

    def put_in_line(self, rid: str, custom_params: dict[str, object] | None) -> None:
        self.active.enqueue(
            rid,
            prompt_ids=list(self.prompts[rid]),
            output_ids=list(self.outputs[rid]),
            max_new_tokens=100,
            stop_token_ids=[],
            custom_params=custom_params,
        )

    def serve(self, rng: random.Random) -> None:
        """One pass, in which the target accepts a random part of each tree."""
        rids = rng.sample(list(self.prompts), len(self.prompts))
        for rid in rids:
            self.active.admit(rid)
            self.outputs[rid] = self.outputs[rid] or text(self.number(rid), 1, rng)
        batch = self.active.propose(rids, [self.outputs[rid] for rid in rids], WIDTH)
        trees = [batch[row] for row in range(len(batch))]
        paths = []
        for rid, tree in zip(rids, trees, strict=True):
            assert set(tree.token_ids) <= {*COMMON, *own(self.number(rid))}
            self.proposed += len(tree) - 1
            paths.append(follow(tree, rng))
        bonus_ids = [text(self.number(rid), 1, rng)[0] for rid in rids]
        finish_pass(self.active, rids, batch, paths, bonus_ids)
        for rid, tree, path, bonus_id in zip(rids, trees, paths, bonus_ids, strict=True):
            self.outputs[rid] += [*(tree.token_ids[node] for node in path), bonus_id]

    def number(self, rid: str) -> int:
        return number_of(self.prompts[rid])


def follow(tree: DraftTree, rng: random.Random) -> list[int]:
    """A random path that starts at a child of the root; may be empty."""
    path: list[int] = []
    while rng.random() < 0.8:
        at = path[-1] if path else 0
        children = [node for node in range(1, len(tree)) if tree.parents[node] == at]
        if not children:
            break
        path.append(rng.choice(children))
    return path


@given(steps, st.integers(0, 4), st.sampled_from([96, 4096]))
@settings(max_examples=200)
def test_every_proposed_token_is_of_the_requests_own_vocabulary(
    actions: list[tuple[str, str, int]], delay: int, max_total_tokens: int
) -> None:
    requests = Requests(delay, max_total_tokens)
    for action in actions:
        requests.do(*action)
        requests.active.check_integrity()


def test_requests_get_drafts_while_their_rids_are_used_again() -> None:
    """The schedules propose drafts, so the test above does not hold trivially."""
    requests = Requests(delay=3, max_total_tokens=4096)
    rng = random.Random(0)
    for _ in range(MAX_REQUESTS - len(RIDS)):
        for rid in RIDS if requests.requests < 3 else (rng.choice(RIDS),):
            requests.do("enqueue", rid, rng.randrange(2**16))
        for _ in range(4):
            requests.do("late", "a", rng.randrange(2**16))
            requests.do("poll", "a", 0)
            requests.do("pass", "a", rng.randrange(2**16))
    assert requests.proposed > 2 * MAX_REQUESTS
    assert requests.active.describe()["accepted_tokens"]["queue"] > MAX_REQUESTS / 2
