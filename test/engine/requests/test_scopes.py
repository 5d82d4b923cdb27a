"""The numbers that stand for LoRA adapters and cache keys in messages to the sidecar."""

from types import SimpleNamespace

import pytest

from sglang_qspec.engine.requests import scopes
from sglang_qspec.engine.requests.scopes import Scopes, scope_of
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Submit
from test.engine.speculating import VOCAB, connect, counting, enqueue, poll


def test_a_scope_keeps_its_number_and_no_scope_is_0() -> None:
    numbers = Scopes()
    assert [numbers.number_of(name) for name in (None, "x", "y", "x", None)] == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("name", ["lora_id", "extra_key", "cache_salt"])
def test_adapters_and_cache_keys_are_scopes(name: str) -> None:
    plain = {"lora_id": None, "extra_key": None, "cache_salt": None}
    assert scope_of(SimpleNamespace(**plain)) is None
    first, second = (scope_of(SimpleNamespace(**{**plain, name: text})) for text in "xy")
    assert None is not first != second is not None
    assert first == scope_of(SimpleNamespace(**{**plain, name: "x"}))


def test_a_number_is_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "MAX_KNOWN", 2)
    numbers = Scopes()
    assert [numbers.number_of(name) for name in "abac"] == [1, 2, 1, 3]
    assert numbers.number_of("b") == 4  # left out, since it was named longest ago
    assert numbers.number_of("c") == 3


def test_the_sidecar_gets_the_number_and_not_the_name() -> None:
    submits: list[Submit] = []

    def drafts(submit: Submit) -> list[list[int]]:
        submits.append(submit)
        return [list(draft) for draft in counting(submit)]

    active = connect(FakeSidecarLink(drafts, vocab_size=VOCAB))
    for rid, scope in (("a", "secret"), ("b", None), ("c", "other"), ("d", "secret")):
        enqueue(active, rid, scope=scope)
    poll(active)
    assert [submit.scope for submit in submits] == [1, 0, 2, 1]
    assert not any("secret" in repr(submit) for submit in submits)
    active.drop_drafts()  # submits the waiting requests again
    poll(active)
    assert [submit.scope for submit in submits[4:]] == [1, 0, 2, 1]
