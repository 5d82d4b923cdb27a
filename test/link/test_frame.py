"""The codec passes allowed messages, and each end refuses invalid messages."""

import re

import msgspec
import pytest

from sglang_qspec.errors import LinkError
from sglang_qspec.link.frame import decode_from_sidecar, decode_to_sidecar, encode
from sglang_qspec.messages import (
    MAX_CANDIDATES,
    MAX_COMMIT_TOKENS,
    MAX_COMMITS,
    MAX_DRAFTED_TOKENS,
    MAX_DRAWN_TOKENS,
    MAX_FROM_SIDECAR_BYTES,
    MAX_NUMBER,
    MAX_STATE_BYTES,
    MAX_STOP_TOKENS,
    Candidates,
    Commit,
    Commits,
    Drafted,
    SeededSampling,
    States,
    Submit,
    ToSidecar,
    max_to_sidecar_bytes,
)

VOCAB_SIZE = 100
SUBMIT = Submit(1, [1, 2], 0, 8, 2, 0.5, top_p=0.9, greedy_first=False, rank=(-(1 << 62), 3))
SEEDED = SeededSampling(-(1 << 63), 0.7, top_k=50, top_p=0.9, min_p=0.1)
COMMIT = Commit(1, 3, [4, 99], 7)
OTHER = Commit(2, 0, [5], 7)
SEEDED_SUBMIT = msgspec.structs.replace(SUBMIT, seeded=SEEDED)
REJECTING = msgspec.structs.replace(SUBMIT, seeded=SeededSampling(0, 0.7, probabilities=True))
CANDIDATES = [Candidates([4, 9], [0.25, 0.75]), Candidates([99], [1.0])]
DRAFTED = Drafted(1, 64, 3, 0, [9, 99], candidates=CANDIDATES)


def refuse(error: LinkError) -> None:
    raise error


def from_server(frame: bytes) -> ToSidecar:
    """Decode as a sidecar; fails if any entry is left out."""
    return decode_to_sidecar(frame, VOCAB_SIZE, refuse, 1 << 20)


@pytest.mark.parametrize(
    "message",
    [SUBMIT, SEEDED_SUBMIT, REJECTING, Commits([COMMIT]), Commits([]), States(3, 7, b"abcd")],
)
def test_allowed_messages_decode_to_what_was_encoded(message: Submit | Commits) -> None:
    assert from_server(encode(message)) == message


def test_a_submit_of_an_older_server_is_greedy_first_and_has_no_rank() -> None:
    fields = {"type": "submit", "submission": 1, "token_ids": [1], "base_len": 0}
    fields |= {"max_new_tokens": 8, "completions": 2, "temperature": 0.5}
    message = from_server(msgspec.msgpack.encode(fields))
    assert message == Submit(1, [1], 0, 8, 2, 0.5)
    assert (message.top_p, message.greedy_first, message.rank) == (1.0, True, (0, 0))
    assert message.seeded is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"submission": -1}, "`int` >= 0 - at `$.submission`"),
        ({"token_ids": []}, "length >= 1 - at `$.token_ids`"),
        ({"token_ids": [1] * (MAX_COMMIT_TOKENS + 1)}, "length <= 4096 - at `$.token_ids`"),
        ({"base_len": -1}, "`int` >= 0 - at `$.base_len`"),
        ({"max_new_tokens": 1 << 40}, "`int` <= 64 - at `$.max_new_tokens`"),
        ({"token_ids": [1, VOCAB_SIZE]}, "Commit.token_ids has the token id 100"),
    ],
)
def test_an_invalid_commit_is_left_out_and_the_others_stay(
    change: dict[str, object], words: str
) -> None:
    bad = msgspec.structs.replace(COMMIT, **change)
    reports: list[LinkError] = []
    frame = encode(Commits([COMMIT, bad, OTHER]))
    assert decode_to_sidecar(frame, VOCAB_SIZE, reports.append, 1 << 20) == Commits([COMMIT, OTHER])
    (report,) = reports
    assert "Commit" in str(report)
    assert words in str(report)


@pytest.mark.parametrize(
    "bad", [7, None, {}, {"submission": "a"}, {"submission": 1, "base_len": 0}]
)
def test_an_entry_that_is_no_commit_is_left_out_and_the_others_stay(bad: object) -> None:
    entries = [msgspec.to_builtins(COMMIT), bad, msgspec.to_builtins(OTHER)]
    frame = msgspec.msgpack.encode({"type": "commits", "requests": entries})
    reports: list[LinkError] = []
    assert decode_to_sidecar(frame, VOCAB_SIZE, reports.append, 1 << 20) == Commits([COMMIT, OTHER])
    assert len(reports) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": []}, "submit: Expected `array` of length >= 1 - at `$.token_ids`"),
        ({"submission": 1 << 63}, f"submit: Expected `int` <= {MAX_NUMBER} - at `$.submission`"),
        ({"scope": -1}, "submit: Expected `int` >= 0 - at `$.scope`"),
        ({"scope": 1 << 63}, f"submit: Expected `int` <= {MAX_NUMBER} - at `$.scope`"),
        ({"stop_token_ids": [1] * (MAX_STOP_TOKENS + 1)}, "1024 - at `$.stop_token_ids`"),
        ({"token_ids": [1, VOCAB_SIZE]}, "Submit.token_ids has the token id 100"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "Submit.stop_token_ids has the token id 100"),
        ({"base_len": 3}, "Submit.base_len is 3, but must be at most the number of token_ids (2)"),
        ({"temperature": 5e-7}, "Submit.temperature is 5e-07, but must be 0 or at least 1e-06"),
        ({"top_p": -0.1}, "`float` >= 0.0 - at `$.top_p`"),
        ({"top_p": 1.1}, "`float` <= 1.0 - at `$.top_p`"),
        ({"top_p": float("nan")}, "`float` >= 0.0 - at `$.top_p`"),
    ],
)
def test_a_submit_that_no_server_sends_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(LinkError, match=re.escape(words)):
        from_server(encode(msgspec.structs.replace(SUBMIT, **change)))


def test_a_frame_is_no_longer_than_its_receiver_allows() -> None:
    frame = encode(SUBMIT)
    with pytest.raises(LinkError, match=f"{len(frame)} bytes"):
        decode_to_sidecar(frame, VOCAB_SIZE, refuse, len(frame) - 1)
    with pytest.raises(LinkError, match="bytes"):
        encode(SUBMIT, len(frame) - 1)
    with pytest.raises(LinkError, match="bytes"):
        decode_from_sidecar(b"x" * (MAX_FROM_SIDECAR_BYTES + 1), VOCAB_SIZE)


def test_the_largest_messages_that_the_protocol_allows_fit_their_frames() -> None:
    vocab_size = 1 << 31
    token, probs = vocab_size - 1, [1 / MAX_CANDIDATES] * MAX_CANDIDATES
    largest = MAX_DRAWN_TOKENS * [Candidates(list(range(token, token - MAX_CANDIDATES, -1)), probs)]
    drawn = Drafted(1 << 60, 64, 3, 0, [token] * MAX_DRAWN_TOKENS, candidates=largest)
    tokens = [token] * MAX_DRAFTED_TOKENS
    plain = Drafted(1 << 60, 64, 3, 0, tokens, second_ids=tokens)
    for drafted in (drawn, plain):
        assert decode_from_sidecar(encode(drafted), vocab_size) == drafted
    context_len = 8192
    limit = max_to_sidecar_bytes(context_len)
    submit = msgspec.structs.replace(
        SEEDED_SUBMIT, token_ids=[token] * context_len, stop_token_ids=[token] * MAX_STOP_TOKENS
    )
    report = [Commit(1 << 60, token, [token] * 48, 64)] * (MAX_COMMITS - 1)
    commits = Commits([*report, Commit(1 << 60, token, [token] * MAX_COMMIT_TOKENS, 64)])
    states = States(1 << 60, token, bytes(MAX_STATE_BYTES))
    for message in (submit, commits, states):
        assert decode_to_sidecar(encode(message, limit), vocab_size, refuse, limit) == message


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1 << 63},
        {"temperature": 0.0},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": float("nan")},
        {"min_p": -0.1},
    ],
)
def test_sampling_parameters_that_no_target_uses_are_refused(change: dict[str, object]) -> None:
    seeded = msgspec.structs.replace(SEEDED, **change)
    (field,) = change
    with pytest.raises(LinkError, match=rf"at `\$\.seeded\.{field}`"):
        from_server(encode(msgspec.structs.replace(SUBMIT, seeded=seeded)))


def test_candidates_decode_to_what_was_encoded_and_an_older_sidecar_sends_none() -> None:
    assert decode_from_sidecar(encode(DRAFTED), VOCAB_SIZE) == DRAFTED
    fields = {"type": "drafted", "submission": 1, "completion": 64, "base_len": 3}
    fields |= {"start": 0, "token_ids": [9]}
    message = decode_from_sidecar(msgspec.msgpack.encode(fields), VOCAB_SIZE)
    assert message == Drafted(1, 64, 3, 0, [9])


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
    with pytest.raises(LinkError, match=r"Candidates\.|at `\$\.candidates\["):
        decode_from_sidecar(encode(msgspec.structs.replace(DRAFTED, candidates=bad)), VOCAB_SIZE)


@pytest.mark.parametrize("count", [1, 3])
def test_candidates_are_given_for_all_tokens_or_for_none(count: int) -> None:
    bad = (CANDIDATES * 2)[:count]
    with pytest.raises(LinkError, match=r"Drafted\.candidates"):
        decode_from_sidecar(encode(msgspec.structs.replace(DRAFTED, candidates=bad)), VOCAB_SIZE)


@pytest.mark.parametrize("second_ids", [[9], [9, 9, 9], [9, VOCAB_SIZE], [-1, 9]])
def test_second_choices_are_tokens_of_the_vocabulary_for_all_tokens(second_ids: list[int]) -> None:
    good = msgspec.structs.replace(DRAFTED, second_ids=[8, 98])
    assert decode_from_sidecar(encode(good), VOCAB_SIZE) == good
    bad = msgspec.structs.replace(DRAFTED, second_ids=second_ids)
    with pytest.raises(LinkError, match="second_ids"):
        decode_from_sidecar(encode(bad), VOCAB_SIZE)


def test_commits_of_too_many_requests_are_refused() -> None:
    bad = msgspec.structs.replace(COMMIT, base_len=-1)
    for entries in ([COMMIT], [bad]):
        with pytest.raises(LinkError, match=r"commits: .* <= 256 - at `\$\.requests`"):
            from_server(encode(Commits([*entries, *[COMMIT] * MAX_COMMITS])))
