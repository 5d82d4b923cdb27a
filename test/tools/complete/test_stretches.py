"""Text in stretches: no text is lost, no character is split, each stretch has its draft source."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.tools.complete import token_texts
from sglang_qspec.tools.complete.stretches import Stretch, Stretches


class Bytes:
    """A tokenizer with byte sequences as tokens, as in byte-level BPE."""

    def __init__(self, tokens: Sequence[bytes], *, drops_first_space: bool = False) -> None:
        self.tokens = tokens
        self.drops_first_space = drops_first_space

    def decode(self, batch: Sequence[Sequence[int]]) -> list[str]:
        texts = [b"".join(self.tokens[i] for i in ids).decode(errors="replace") for ids in batch]
        return [t.removeprefix(" ") for t in texts] if self.drops_first_space else texts


def joined(stretches: Sequence[Stretch]) -> str:
    return "".join(stretch.text for stretch in stretches)


def test_runs_of_one_source_are_one_stretch() -> None:
    stretches = Stretches(Bytes([b"The", b" cat", b" sat", b"."]).decode)
    provenance = ["target", "queue", "queue", "target"]
    assert list(stretches.take("The cat sat.", [0, 1, 2, 3], provenance)) == [
        ("target", "The"),
        ("queue", " cat sat"),
        ("target", "."),
    ]
    assert list(stretches.finish("The cat sat.", provenance)) == []


def test_a_character_of_several_tokens_belongs_to_the_last_of_them() -> None:
    euro = "€".encode()
    stretches = Stretches(Bytes([b"5 ", euro[:1], euro[1:], b"!"]).decode)
    provenance = ["target", "queue", "step", "target"]
    assert list(stretches.take("5 €!", [0, 1, 2, 3], provenance)) == [
        ("target", "5 "),
        ("step", "€"),
        ("target", "!"),
    ]


def test_text_that_arrives_after_its_tokens_keeps_its_source() -> None:
    euro = "€".encode()
    stretches = Stretches(Bytes([b"a", b" caf", euro[:2], euro[2:]]).decode)
    provenance = ["target", "queue", "queue", "guess"]
    # A server holds back a word that ends in half a character.
    assert list(stretches.take("a ", [0, 1, 2], provenance[:3])) == [
        ("target", "a"),
        ("queue", " "),
    ]
    assert list(stretches.take("a caf€", [0, 1, 2, 3], provenance)) == [
        ("queue", "caf"),
        ("guess", "€"),
    ]


def test_a_tokenizer_that_drops_the_first_space_shifts_nothing() -> None:
    stretches = Stretches(Bytes([b" Paris", b" is"], drops_first_space=True).decode)
    assert list(stretches.take(" Paris is", [0, 1], ["target", "step"])) == [
        ("target", " Paris"),
        ("step", " is"),
    ]


def test_a_text_shorter_than_its_tokens_is_marked_up_to_its_end() -> None:
    """A stop string or a hidden token can cut the text."""
    stretches = Stretches(Bytes([b"one", b" two", b"</s>"]).decode)
    provenance = ["target", "step", "target"]
    found = [
        *stretches.take("one t", [0, 1, 2], provenance),
        *stretches.finish("one t", provenance),
    ]
    assert found == [("target", "one"), ("step", " t")]


@pytest.fixture(scope="module", autouse=True)
def _small_windows() -> Iterator[None]:
    """Windows of a few tokens, which short texts fill too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_texts, "LONGEST", 2)
        patch.setattr(token_texts, "KEPT", 1)
        yield


@given(st.data())
def test_every_character_appears_once_however_the_text_is_split(data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="ab é€🙂", max_size=24))
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=16)) | {0, len(raw)})
    tokens = [raw[a:b] for a, b in pairwise(cuts)]
    sources = st.sampled_from(["target", "queue", "step"])
    provenance = [data.draw(sources) for _ in tokens]
    stretches = Stretches(Bytes(tokens).decode)
    found: list[Stretch] = []
    known = shown = 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        whole = len(b"".join(tokens[:known]).decode(errors="ignore"))
        # The last piece has the whole text.
        shown = whole if known == len(tokens) else data.draw(st.integers(shown, whole))
        found += stretches.take(text[:shown], list(range(known)), provenance[:known])
    found += stretches.finish(text, provenance)
    assert joined(found) == text
    # Each character belongs to its last token.
    ends = [len(b"".join(tokens[:n]).decode(errors="ignore")) for n in range(1, len(tokens) + 1)]
    expected = [
        provenance[next(n for n, end in enumerate(ends) if end > at)] for at in range(len(text))
    ]
    assert [stretch.source for stretch in found for _ in stretch.text] == expected


def test_a_long_answer_decodes_only_its_last_tokens() -> None:
    letters = Bytes([b"a"] * 200)
    decoded: list[int] = []

    def decode(batch: Sequence[Sequence[int]]) -> list[str]:
        decoded.extend(map(len, batch))
        return letters.decode(batch)

    stretches = Stretches(decode)
    for known in range(1, 201):
        assert joined(list(stretches.take("a" * known, range(known), ["step"] * known))) == "a"
    assert max(decoded) <= token_texts.LONGEST + 1
