"""The items of an answer's tokens become its trace, whole or chunk by chunk."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.engine.frontend import trace
from sglang_qspec.engine.frontend.meta_info import complete_meta_info
from sglang_qspec.engine.frontend.trace import KEY, MORE, OMITTED, PREFILL, AnswerTrace


class Tokenizer:
    """Decodes token ids to letters."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def decode(self, ids: list[int]) -> str:
        self.calls.append(ids)
        return "".join(chr(ord("a") + i) for i in ids)


def item(path: tuple[int, ...] = (0, 1), match_ids: tuple[int, ...] = (7, 8)) -> dict[str, Any]:
    """The description of a pass over a chain of two drafts, of which `path` is accepted."""
    return {
        "pass": {
            "rows": 3,
            "batch_requests": 1,
            "batch_rows": 3,
            "ms": 12.5,
            "pipeline": "queue",
        },
        "match_ids": list(match_ids),
        "tree": {"ids": [3, 4], "parents": [-1, 0], "sources": ["queue"] * 2, "chances": [1, 0.5]},
        "path": list(path),
    }


PASS = [item(), MORE, MORE]


def manager(tokenizer: Any = None) -> Any:
    """The part of SGLang's `TokenizerManager` that the code reads."""
    return SimpleNamespace(tokenizer=tokenizer)


def state() -> Any:
    """The part of SGLang's `ReqState` that the code reads."""
    return SimpleNamespace(customized_info_reported_keys=set())


def add(server: Any, of: Any, items: list[Any], *, finished: bool = False) -> dict[str, Any]:
    """The `meta_info` of the next tokens."""
    meta_info: dict[str, Any] = {}
    trace.add(meta_info, server, of, items, finished=finished)
    return meta_info


def spans(meta_info: dict[str, Any]) -> list[tuple[int, int]]:
    """First token and number of tokens of each pass."""
    return [(one["start"], one["tokens"]) for one in meta_info[KEY]["passes"]]


def test_the_items_of_a_pass_become_its_documented_form() -> None:
    report = AnswerTrace(Tokenizer())
    report.take([PREFILL, *PASS])
    assert report.report == {
        "version": 1,
        "passes": [
            {
                "start": 1,
                "tokens": 3,
                "rows": 3,
                "batch_requests": 1,
                "batch_rows": 3,
                "ms": 12.5,
                "pipeline": "queue",
                "match": {"length": 2, "text": "hi"},
                "tree": {
                    "ids": [3, 4],
                    "texts": ["d", "e"],
                    "parents": [-1, 0],
                    "sources": ["queue", "queue"],
                    "chances": [1, 0.5],
                    "accepted": [True, True],
                },
            }
        ],
        "omitted_passes": 0,
    }


def test_the_page_shows_and_lists_the_fields_of_a_trace() -> None:
    page = (Path(__file__).parents[3] / "docs" / "trace.md").read_text()
    report = AnswerTrace(Tokenizer())
    report.take(PASS)
    example = json.loads(re.search(r"^    \{.*\}$", page, re.MULTILINE | re.DOTALL)[0])  # type: ignore[index]
    made = report.report
    assert list(example) == list(made)
    assert list(example["passes"][0]) == list(made["passes"][0])
    assert list(example["passes"][0]["match"]) == list(made["passes"][0]["match"])
    assert set(example["passes"][0]["tree"]) == set(made["passes"][0]["tree"])
    cells = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert cells == [*made["passes"][0], *example["passes"][0]["tree"]]
    for number in (trace.MAX_PASSES, f"{trace.MAX_NODES:,}", f"{trace.MAX_BYTES >> 20} MiB"):
        assert f" {number} " in page


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_tokens_after_a_stop_are_not_accepted(kept: int) -> None:
    report = AnswerTrace(None)
    report.take(PASS[:kept])
    (one,) = report.passes
    assert one["tokens"] == kept
    assert one["tree"]["accepted"] == [True, kept > 1]


def test_without_a_tokenizer_the_texts_are_null() -> None:
    report = AnswerTrace(None)
    report.take(PASS)
    (one,) = report.passes
    assert one["tree"]["texts"] is None
    assert one["match"] == {"length": 2, "text": None}


def test_a_pass_without_a_match_has_none() -> None:
    report = AnswerTrace(Tokenizer())
    report.take([item((), ())])
    (one,) = report.passes
    assert one["match"] is None
    assert one["tree"]["accepted"] == [False, False]


def test_each_distinct_token_is_decoded_once() -> None:
    tokenizer = Tokenizer()
    report = AnswerTrace(tokenizer)
    report.take(PASS * 5)
    assert tokenizer.calls.count([3]) == tokenizer.calls.count([4]) == 1


def test_tokens_of_prefills_and_omitted_passes_count_in_the_places() -> None:
    report = AnswerTrace(None)
    report.take([PREFILL, *PASS])
    report.take([PREFILL, *PASS, OMITTED, MORE, OMITTED])
    assert [(one["start"], one["tokens"]) for one in report.passes] == [(1, 3), (5, 3)]
    assert report.omitted == 2


def test_passes_over_the_cap_of_bytes_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    report = AnswerTrace(None)
    report.take(PASS)
    monkeypatch.setattr(trace, "MAX_BYTES", 2 * report._bytes)
    report.take(PASS * 2)
    report.take([{**item(), "match_ids": []}, MORE])  # also one that is smaller
    assert len(report.passes) == 2
    assert report.omitted == 2
    assert report.report["omitted_passes"] == 2


def test_a_request_that_does_not_ask_has_only_padding() -> None:
    silent = state()
    assert add(manager(), silent, []) == {}
    assert add(manager(), silent, [None, None]) == {}
    assert not hasattr(silent, trace._TRACE)


def test_sglang_does_not_see_the_items() -> None:
    batch: dict[str, list[Any]] = {KEY: [[None], [PREFILL]], "other": [[1], [2]]}
    seen: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = [{}, {}]
    for index, meta_info in enumerate(answers):
        complete_meta_info(
            lambda *arguments: seen.append(arguments[3]),
            manager(),
            meta_info,
            state(),
            batch,
            index,
            {"type": "stop"},
        )
    assert seen == [{"other": [[1], [2]]}] * 2
    assert [list(meta_info) for meta_info in answers] == [[], [KEY]]


def test_only_the_end_of_an_answer_has_the_trace_and_then_the_whole_one() -> None:
    asking = state()
    for items in ([PREFILL], PASS, []):
        assert add(manager(), asking, items) == {}
    last = add(manager(), asking, [*PASS, OMITTED], finished=True)
    assert spans(last) == [(1, 3), (4, 3)]
    assert last[KEY]["omitted_passes"] == 1
