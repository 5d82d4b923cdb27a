"""What neither end believes of the other."""

import msgspec
import pytest

from sglang_qspec.errors import LinkError
from sglang_qspec.link.frame import MAX_COMMITS, decode_from_sidecar, decode_to_sidecar, encode
from sglang_qspec.messages import MAX_CANDIDATES, Candidates, Commit, Commits, Dice, Drafted, Submit

VOCAB_SIZE = 100
SUBMIT = Submit("a", 1, [1, 2], 0, 8, 2, 0.5, top_p=0.9, greedy_first=False, rank=(-(1 << 62), 3))
DICE = Dice(-(1 << 63), 0.7, top_k=50, top_p=0.9, min_p=0.1)
COMMIT = Commit("a", 1, 3, [4, 99], 7)
DICED = msgspec.structs.replace(SUBMIT, dice=DICE)
REJECTING = msgspec.structs.replace(SUBMIT, dice=Dice(0, 0.7, probabilities=True))
CANDIDATES = [Candidates([4, 9], [0.25, 0.75]), Candidates([99], [1.0])]
DRAFTED = Drafted("a", 1, 64, 3, 0, [9, 99], candidates=CANDIDATES)


@pytest.mark.parametrize("message", [SUBMIT, DICED, REJECTING, Commits([COMMIT]), Commits([])])
def test_what_the_protocol_allows_comes_through_as_it_is(message: Submit | Commits) -> None:
    assert decode_to_sidecar(encode(message), VOCAB_SIZE) == message


def test_a_submit_of_an_older_server_is_greedy_first_and_of_no_rank() -> None:
    fields = {"type": "submit", "rid": "a", "serial": 1, "token_ids": [1], "base_len": 0}
    fields |= {"max_new_tokens": 8, "completions": 2, "temperature": 0.5}
    message = decode_to_sidecar(msgspec.msgpack.encode(fields), VOCAB_SIZE)
    assert message == Submit("a", 1, [1], 0, 8, 2, 0.5)
    assert (message.top_p, message.greedy_first, message.rank) == (1.0, True, (0, 0))
    assert message.dice is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rid": "a" * 5000}, "Commit.rid"),
        ({"serial": -1}, "Commit.serial"),
        ({"base_len": -1}, "Commit.base_len"),
        ({"max_new_tokens": 1 << 40}, "Commit.max_new_tokens"),
        ({"token_ids": [1, VOCAB_SIZE]}, "Commit.token_ids"),
    ],
)
def test_a_commit_that_makes_no_sense_is_refused(change: dict[str, object], words: str) -> None:
    bad = msgspec.structs.replace(COMMIT, **change)
    with pytest.raises(LinkError, match=words):
        decode_to_sidecar(encode(Commits([COMMIT, bad])), VOCAB_SIZE)


@pytest.mark.parametrize("top_p", [-0.1, 1.1, float("nan")])
def test_a_share_of_the_probability_is_from_0_to_1(top_p: float) -> None:
    with pytest.raises(LinkError, match=r"Submit\.top_p"):
        decode_to_sidecar(encode(msgspec.structs.replace(SUBMIT, top_p=top_p)), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1 << 63}, "Dice.seed"),
        ({"temperature": 0.0}, "Dice.temperature"),
        ({"temperature": float("inf")}, "Dice.temperature"),
        ({"top_k": 0}, "Dice.top_k"),
        ({"top_p": float("nan")}, "Dice.top_p"),
        ({"min_p": -0.1}, "Dice.min_p"),
    ],
)
def test_dice_that_no_target_has_are_refused(change: dict[str, object], words: str) -> None:
    dice = msgspec.structs.replace(DICE, **change)
    with pytest.raises(LinkError, match=words):
        decode_to_sidecar(encode(msgspec.structs.replace(SUBMIT, dice=dice)), VOCAB_SIZE)


def test_candidates_come_through_as_they_are_and_an_older_sidecar_sends_none() -> None:
    assert decode_from_sidecar(encode(DRAFTED), VOCAB_SIZE) == DRAFTED
    fields = {"type": "drafted", "rid": "a", "serial": 1, "completion": 64, "base_len": 3}
    fields |= {"start": 0, "token_ids": [9]}
    message = decode_from_sidecar(msgspec.msgpack.encode(fields), VOCAB_SIZE)
    assert message == Drafted("a", 1, 64, 3, 0, [9])


@pytest.mark.parametrize(
    ("token_ids", "probs"),
    [
        ([9, 4, 9], [0.5, 0.25, 0.25]),
        ([4, 5], [0.5, 0.5]),
        ([9, VOCAB_SIZE], [0.5, 0.5]),
        ([9, -1], [0.5, 0.5]),
        ([9, 4], [0.5, 0.4]),
        ([9, 4], [0.5, 0.6]),
        ([9, 4], [1.0, 0.0]),
        ([9, 4], [-0.5, 1.5]),
        ([9, 4], [1.0005, 0.0002]),
        ([9, 4], [0.5, float("nan")]),
        ([9, 4], [float("inf"), 0.5]),
        ([9, 4], [1.0]),
        ([9], [0.5, 0.5]),
        ([], []),
        (list(range(MAX_CANDIDATES + 1)), [1 / (MAX_CANDIDATES + 1)] * (MAX_CANDIDATES + 1)),
    ],
)
def test_candidates_that_no_token_was_drawn_from_are_refused(
    token_ids: list[int], probs: list[float]
) -> None:
    bad = [Candidates(token_ids, probs), CANDIDATES[1]]
    with pytest.raises(LinkError, match="Candidates"):
        decode_from_sidecar(encode(msgspec.structs.replace(DRAFTED, candidates=bad)), VOCAB_SIZE)


@pytest.mark.parametrize("count", [1, 3])
def test_candidates_are_those_of_all_tokens_or_of_none(count: int) -> None:
    bad = (CANDIDATES * 2)[:count]
    with pytest.raises(LinkError, match=r"Drafted\.candidates"):
        decode_from_sidecar(encode(msgspec.structs.replace(DRAFTED, candidates=bad)), VOCAB_SIZE)


def test_commits_of_too_many_requests_are_refused() -> None:
    with pytest.raises(LinkError, match=r"Commits\.requests"):
        decode_to_sidecar(encode(Commits([COMMIT] * (MAX_COMMITS + 1))), VOCAB_SIZE)
