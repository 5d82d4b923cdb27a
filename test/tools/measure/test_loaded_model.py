"""A process of its own measures a model, and says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.errors import MeasureError
from sglang_qspec.tools.measure.agreement import share
from sglang_qspec.tools.measure.model_process import Answer, ModelOptions, ModelProcess, open_model
from sglang_qspec.tools.models import DemoModels
from test.random_llama import write_random_llama

VOCAB = 49152


def options(model: Path, **given: Any) -> ModelOptions:
    return ModelOptions(path=str(model), device="cpu", mem_fraction=0.1, tokens=4096, **given)


@pytest.fixture(scope="module")
def model(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    return write_random_llama(folder, models, **sizes)


@pytest.fixture(scope="module")
def child(model: Path) -> Iterator[ModelProcess]:
    contexts = [[5, 6, 7], [8, 9, VOCAB + 7]]  # the last id is one of the target's alone
    with open_model("target", options(model, target=True, contexts=contexts), None) as child:
        yield child


def test_passes_of_any_size_are_timed_and_leave_room_for_more(child: ModelProcess) -> None:
    for rows in (1, 4, 2):
        assert 0 < child.call("pass_seconds", rows=rows, seconds=0.05) < 60
    for _ in range(70):  # 16 rows of at least four tokens each; there are 4096 KV slots
        child.call("pass_seconds", rows=16, seconds=0.0)


def test_a_model_agrees_with_its_own_text_and_not_with_another(child: ModelProcess) -> None:
    prompts = child.call("encode", texts=["Why is the sea salty?", "Count to ten."])
    assert len(prompts) == 2
    assert all(prompts)
    texts = child.call("greedy", prompts=prompts, tokens=12)
    count = sum(map(len, texts))
    agreed = agreements(child, prompts, texts)
    assert sum(map(len, agreed)) == count > 0
    assert share(agreed) >= 0.9  # passes over one row and over two can round differently
    # A small random model repeats its last token, so no two neighbours are equal.
    wrong = [[(token + 7 * place + 1) % VOCAB for place, token in enumerate(t)] for t in texts]
    assert share(agreements(child, prompts, wrong)) <= 0.5


def agreements(
    child: ModelProcess, prompts: list[list[int]], texts: list[list[int]]
) -> list[list[bool]]:
    answers = [Answer(*each) for each in zip(prompts, texts, strict=True)]
    found: list[list[bool]] = child.call("agreed", answers=answers, target_vocab=VOCAB)
    return found


def test_an_answer_is_read_up_to_the_first_id_that_the_model_lacks(child: ModelProcess) -> None:
    beyond = VOCAB + 3
    texts = [[5, beyond, 5, 5], [7, 7]]
    agreed = agreements(child, [[5, 6], [beyond]], texts)
    assert [len(each) for each in agreed] == [4, 2]
    assert agreed[0][1:] == [False] * 3
    assert agreed[1] == [False] * 2


def test_an_error_of_a_call_is_raised_and_the_process_answers_the_next_call(
    child: ModelProcess,
) -> None:
    with pytest.raises(MeasureError, match="the target cannot be measured: .*KV"):
        child.call("pass_seconds", rows=4000, seconds=0.01)
    assert child.call("describe") == {"dtype": "bfloat16", "quantization": None}
    assert child.call("memory_bytes") > 1 << 20


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    words = "the draft model cannot be measured: draft model .*config"
    with (
        open_model("draft model", options(tmp_path), None) as child,
        pytest.raises(MeasureError, match=words),
    ):
        child.call("describe")


def test_the_end_of_a_process_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        open_model("target", options(tmp_path, contexts=["no ids"]), None) as child,
        pytest.raises(
            MeasureError, match=r"target cannot be measured: .*contexts.* \(exit code 1\)"
        ),
    ):
        child.call("describe")
