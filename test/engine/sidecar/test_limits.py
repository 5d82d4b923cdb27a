"""The draft model of these tests lacks the target's last token ids, and never gets them."""

from __future__ import annotations

import msgspec
import pytest

from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from test.engine.speculating import (
    VOCAB,
    commits,
    connect,
    counting,
    decode,
    enqueue,
    poll,
    replace_sidecar,
    tree_of,
)

IDS = VOCAB - 100
"""Number of token ids of the draft model."""


@pytest.fixture
def link() -> FakeSidecarLink:
    return FakeSidecarLink(counting, vocab_size=IDS)


def reasons(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


def test_a_prompt_with_an_id_that_the_draft_model_lacks_is_not_submitted_and_delays_no_other(
    active: Speculator, link: FakeSidecarLink, caplog: pytest.LogCaptureFixture
) -> None:
    enqueue(active, "a", prompt_ids=[5, IDS, 7])
    enqueue(active, "b", prompt_ids=[5, IDS - 1, 7])
    poll(active)
    assert [submit.token_ids for submit in link.submits] == [[5, IDS - 1, 7]]
    assert active.describe()["declined_requests"] == 1
    assert f"token id {IDS}, but the draft model has only ids below {IDS}" in reasons(caplog)
    assert link.malformed == 0
    active.check_integrity()


def test_after_output_that_the_draft_model_lacks_the_sidecar_drafts_no_more_for_the_request(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    poll(active)
    active.admit("a")
    output = decode(active, [8], [], IDS - 1)
    assert [commit.token_ids for commit in commits(link)] == [[8], [IDS - 1]]
    output = decode(active, output, [], IDS + 50)
    output = decode(active, output, [], 9)
    assert [commit.token_ids for commit in commits(link)] == [[8], [IDS - 1]]
    assert [close.submission for close in link.closes] == [link.submits[0].submission]
    assert active.describe()["declined_requests"] == 1
    # Lookups in the output still draft for it.
    output = decode(active, output, [], IDS - 1)
    assert tree_of(active, "a", output, 4).token_ids[1] == IDS + 50
    assert link.malformed == 0
    active.check_integrity()


def test_a_retracted_request_with_such_output_is_not_submitted_again(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    poll(active)
    enqueue(active, output_ids=[8, IDS])
    poll(active)
    assert len(link.submits) == 1
    assert active.describe()["declined_requests"] == 1
    active.check_integrity()


@pytest.mark.parametrize("fresh", [[9], [IDS]])
def test_output_before_the_sidecar_is_ready_counts_too(fresh: list[int]) -> None:
    link = FakeSidecarLink(counting, vocab_size=IDS)
    link.die()
    active = connect(link)
    enqueue(active)
    active.admit("a")
    active.propose(["a"], [[8, *fresh]], 4)
    assert active.describe()["declined_requests"] == 0
    link.revive()
    poll(active)
    assert len(link.submits) == (fresh == [9])
    assert active.describe()["declined_requests"] == (fresh == [IDS])


def test_a_sidecar_whose_draft_model_has_the_ids_gets_the_request(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active, prompt_ids=[5, IDS, 7])
    poll(active)
    assert not link.submits
    link._welcome = msgspec.structs.replace(link._welcome, vocab_size=VOCAB)
    replace_sidecar(active, link)
    assert [submit.token_ids for submit in link.submits] == [[5, IDS, 7]]


def test_stop_tokens_that_the_draft_model_lacks_are_not_sent(
    active: Speculator, link: FakeSidecarLink
) -> None:
    """SGLang allows any whole number as a stop token."""
    enqueue(active, stop_token_ids=[-1, 2, IDS - 1, IDS, VOCAB, 1 << 70])
    poll(active)
    assert [submit.stop_token_ids for submit in link.submits] == [[2, IDS - 1]]
    assert link.malformed == 0


def test_a_draft_model_with_more_ids_than_the_target_gets_every_text() -> None:
    link = FakeSidecarLink(counting, vocab_size=VOCAB + 100)
    active = connect(link)
    enqueue(active, prompt_ids=[5, VOCAB - 3], stop_token_ids=[2, VOCAB + 5])
    poll(active)
    assert [submit.stop_token_ids for submit in link.submits] == [[2]]
    # Its completion counts up beyond the target's ids. The trie takes no such token.
    tree = tree_of(active, "a", [VOCAB - 2], 4)
    assert max(tree.token_ids) < VOCAB
