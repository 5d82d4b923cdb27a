"""Requests of different scopes share neither drafts nor KV, also where texts are equal.

A scope is a LoRA adapter, or a key by which clients divide the prefix cache.
"""

import pytest

from sglang_qspec.link import Peer
from sglang_qspec.messages import SeededSampling
from test.sidecar.drafter_driver import ONE, TWO, DrafterDriver
from test.sidecar.scripted import ScriptedModel, undecided

PROMPT = list(range(100, 150))


def read_for(scope: int, peer: Peer, *, share: bool = False, before: int = 1) -> int:
    """Tokens read for a request, after a request of another text of the scope `before`."""
    driver = DrafterDriver(ScriptedModel(), share=share)
    driver.submit("a", PROMPT, scope=before)
    driver.run()
    already = driver.model.read_tokens
    driver.submit("b", [*PROMPT, 7], peer=peer, scope=scope)
    driver.run()
    read = driver.model.read_tokens - already
    driver.leave("a", "b")
    return read


def test_only_requests_of_one_scope_share_the_kv_of_a_common_prefix() -> None:
    whole = len(PROMPT) + 1
    assert read_for(1, ONE) < whole
    assert read_for(2, ONE) == whole
    assert read_for(0, ONE) == whole
    assert read_for(1, ONE, before=0) == whole


def test_servers_that_share_drafts_share_none_of_requests_with_scopes() -> None:
    """Each server has its own numbers, so equal numbers of two servers are different scopes."""
    whole = len(PROMPT) + 1
    assert read_for(0, TWO, share=True, before=0) < whole
    assert read_for(1, TWO, share=True, before=1) == whole
    driver = DrafterDriver(undecided(), share=True)
    for peer in (ONE, TWO):
        driver.submit("a", PROMPT, peer=peer, completions=1, scope=1)
    driver.run()
    assert len(driver.drafter.queue.prompts) == 2
    assert driver.drafter.statistics.drafted_tokens == 2 * 10
    driver.leave("a")


@pytest.mark.parametrize(("scope", "shared"), [(1, True), (2, False), (0, False)])
def test_only_requests_of_one_scope_share_the_completions_of_a_prompt(
    scope: int, shared: bool
) -> None:
    driver = DrafterDriver(undecided())
    driver.submit("a", PROMPT, scope=1, seeded=SeededSampling(5, 1.0))
    driver.submit("b", PROMPT, scope=scope, seeded=SeededSampling(6, 1.0))
    driver.run()
    assert len(driver.drafter.queue.prompts) == (1 if shared else 2)
    seeded = tuple(driver.told[ONE, "a", 0])
    assert (seeded in {tuple(driver.told[ONE, "b", number]) for number in range(3)}) == shared
    driver.leave("a", "b")


def test_a_step_draft_reuses_the_kv_of_its_own_request() -> None:
    driver = DrafterDriver(ScriptedModel())
    driver.submit("a", PROMPT, scope=1, completions=1)
    driver.run()
    driver.admit("a")
    before = driver.model.read_tokens
    driver.commit("a", 0, [3, 4])
    driver.run()
    assert driver.model.read_tokens - before <= 3
    driver.leave("a")
