"""The marks around drafted text."""

from sglang_qspec.tools.complete.marks import Brackets, Colours, summary
from sglang_qspec.tools.complete.stretches import Stretch

STRETCHES = [
    Stretch("target", "The"),
    Stretch("queue", " cat"),
    Stretch("queue", " sat"),
    Stretch("step", " down"),
    Stretch("target", "."),
]


def test_brackets_open_and_close_with_a_source() -> None:
    marks = Brackets()
    text = "".join(marks.mark(stretch) for stretch in STRETCHES)
    assert text + marks.end() == "The[queue: cat sat][step: down]."
    assert Brackets().end() == ""


def test_an_answer_that_ends_in_a_draft_closes_its_bracket() -> None:
    marks = Brackets()
    assert marks.mark(Stretch("guess", "x")) + marks.end() == "[guess:x]"


def test_each_source_has_its_colour_and_the_target_has_none() -> None:
    marks = Colours()
    assert marks.mark(Stretch("target", "The")) == "The"
    assert marks.mark(Stretch("queue", " cat")) == "\x1b[32m cat\x1b[0m"
    assert marks.end() == ""


def test_the_summary_counts_tokens_and_names_colours() -> None:
    provenance = ["target", "step", "step", "queue", "target"]
    assert summary(provenance, 2, Brackets()) == ("5 tokens in 2 passes: 1 queue, 2 step, 2 target")
    assert "2 \x1b[36mstep\x1b[0m" in summary(provenance, 2, Colours())
