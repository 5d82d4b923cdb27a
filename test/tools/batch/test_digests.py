"""The set of texts that keeps eight bytes of each."""

from sglang_qspec.tools.batch.digests import Digests


def test_a_text_is_new_once() -> None:
    texts = Digests()
    names = [f"request-{i}" for i in range(5000)]
    assert all(texts.add(name) for name in names)
    assert not any(texts.add(name) for name in names)
    assert all(name in texts for name in names)
    assert "request-5000" not in texts
    assert len(texts) == 5000


def test_a_text_takes_at_most_32_bytes() -> None:
    texts = Digests()
    for i in range(5000):
        texts.add(str(i))
    assert texts.nbytes <= 32 * 5000
