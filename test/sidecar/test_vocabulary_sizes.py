"""Target and draft model have the same tokenizer, but vocabularies of different sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.config import MAX_COMPLETIONS, QSpecConfig
from sglang_qspec.link import LinkState, Peer, PrivateEndpoint
from sglang_qspec.messages import (
    Commit,
    Commits,
    SeededSampling,
    Submit,
)
from sglang_qspec.sidecar.child_process import SidecarProcess
from sglang_qspec.tools.models import DemoModels
from test.random_llama import pad_vocabulary, write_random_llama
from test.sidecar.drafter_driver import DrafterDriver
from test.sidecar.resident import check_memory
from test.sidecar.running import IDS, Connection, hello_of, running
from test.sidecar.scripted import ScriptedModel

SMALL, LARGE, LARGER = (Peer(str(n), bytes([n % 251]), n) for n in (50, 100, 120))
"""Servers of targets with 50, 100 and 120 token ids; the scripted model has 100."""


def driver_of(**options: bool) -> DrafterDriver:
    return DrafterDriver(ScriptedModel(vocab_size=100), **options)


@pytest.mark.parametrize(
    "seeded",
    [None, SeededSampling(3, 1.0), SeededSampling(0, 1.0, probabilities=True)],
    ids=["greedy", "match", "reject"],
)
def test_a_draft_has_only_ids_that_the_target_has(seeded: SeededSampling | None) -> None:
    driver = driver_of()
    for peer in (SMALL, LARGE):
        driver.submit("a", [44], peer=peer, seeded=seeded)
        driver.run()
        assert driver.told[peer, "a", 0][:5] == [45, 46, 47, 48, 49]
        driver.drafter.follow(peer, Commits([Commit(driver.number("a"), 0, [47], 8)]))
        driver.run()
        assert driver.told[peer, "a", MAX_COMPLETIONS][:2] == [48, 49]
    told = {
        peer: {
            token
            for (each, _, _), tokens in driver.told.items()
            if each == peer
            for token in tokens
        }
        for peer in (SMALL, LARGE)
    }
    assert max(told[SMALL]) == 49
    assert max(told[LARGE]) > 50
    driver.drafter.check_integrity()


def test_servers_share_completions_only_if_their_targets_have_the_same_ids_of_the_draft() -> None:
    driver = driver_of(share=True)
    for peer in (SMALL, LARGE, LARGER):
        driver.submit("a", [44], peer=peer)
    driver.run()
    assert len(driver.drafter.queue.prompts) == 2
    assert driver.told[LARGE, "a", 1] == driver.told[LARGER, "a", 1] != driver.told[SMALL, "a", 1]
    assert max(driver.told[SMALL, "a", 0]) < 50 < max(driver.told[LARGE, "a", 0])


SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
PROMPT = [504, 3575, 282, 4649, 314]


@dataclass
class Padded:
    """A running sidecar with a draft model of IDS + 128 ids; it favours its last 128 ids."""

    process: SidecarProcess
    endpoint: PrivateEndpoint
    target: Path

    def draft(self, vocab_size: int, submits: Sequence[Submit]) -> dict[int, list[int]]:
        """The drafted tokens of each submission, for a target with this number of ids."""
        ends = {(submit.submission, n) for submit in submits for n in range(submit.completions)}
        hello = hello_of(self.target, vocab_size)
        with Connection(self.process, self.endpoint, hello) as server:
            assert server.link.state is LinkState.READY
            assert all(server.link.send(submit) for submit in submits)
            server.until(lambda: ends <= server.finished)
            assert not server.declined
            assert not server.link.malformed
        told: dict[int, list[int]] = defaultdict(list)
        for (submission, _), token_ids in server.told.items():
            told[submission] += token_ids
        return told


@pytest.fixture(scope="module")
def padded(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Padded]:
    folder: Path = tmp_path_factory.mktemp("padded")
    write_random_llama(folder / "plain", models, max_position_embeddings=512, **SHAPE)
    pad_vocabulary(folder / "plain", folder / "draft", IDS + 128, scale=4.0)
    settings = QSpecConfig(mem_fraction=0.05, draft_slots=8)
    with running(settings, str(folder / "draft")) as (process, endpoint):
        yield Padded(process, endpoint, models.target)


KINDS: dict[int, dict[str, Any]] = {
    1: {"completions": 2},
    2: {"completions": 2, "seeded": SeededSampling(5, 0.3)},
    3: {"completions": 2, "seeded": SeededSampling(5, 0.3, top_k=50, top_p=0.9)},
}


def submits() -> list[Submit]:
    return [
        Submit(number, PROMPT, 0, 12, temperature=0.3, ignore_eos=True, **kind)
        for number, kind in KINDS.items()
    ]


def test_a_padded_draft_model_drafts_its_padding_only_for_a_target_with_the_same_padding(
    padded: Padded,
) -> None:
    for vocab_size, most in ((IDS, IDS), (IDS + 128, IDS + 128), (IDS - 64, IDS - 64)):
        told = padded.draft(vocab_size, submits())
        drafted = [token for tokens in told.values() for token in tokens]
        assert len(drafted) == 12 * 2 * len(KINDS)
        assert max(drafted) < most
        assert (max(drafted) >= IDS) is (vocab_size > IDS)


def test_a_text_with_ids_that_the_draft_model_lacks_does_not_harm_the_sidecar(
    padded: Padded,
) -> None:
    """A server that sends such a text violates the protocol, so it gets no answer to it."""
    bad = Submit(9, [*PROMPT, IDS + 128], 0, 12, 0, 0.3)
    told = padded.draft(IDS + 256, [bad, *submits()])
    assert sorted(told) == sorted(KINDS)


def test_a_sidecar_of_another_shape_takes_the_memory_that_is_announced(padded: Padded) -> None:
    padded.draft(IDS, submits())
    check_memory(padded.process.pid, 0.05)
