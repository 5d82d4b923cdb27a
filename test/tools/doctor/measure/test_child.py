"""A process of its own measures a model, and says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.errors import MeasureError
from sglang_qspec.tools.compare.agreement import share
from sglang_qspec.tools.doctor.measure.child import Child, open_child
from sglang_qspec.tools.models import DemoModels
from test.random_llama import write_random_llama

PLACE = ("--device=cpu", "--mem-fraction=0.1", "--tokens=4096")


@pytest.fixture(scope="module")
def model(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    return write_random_llama(folder, models, **sizes)


@pytest.fixture(scope="module")
def child(model: Path) -> Iterator[Child]:
    with open_child("target", None, f"--model-path={model}", "--target", *PLACE) as child:
        yield child


def test_passes_of_any_size_are_timed_and_leave_room_for_more(child: Child) -> None:
    for rows in (1, 4, 2):
        assert 0 < child.call("seconds", rows=rows, seconds=0.05) < 60
    for _ in range(130):  # 16 rows of at least two tokens each; there are 4096 KV slots
        child.call("seconds", rows=16, seconds=0.0)


def test_a_model_agrees_with_its_own_text_and_not_with_another(child: Child) -> None:
    prompts = child.call("encode", texts=["Why is the sea salty?", "Count to ten."])
    assert len(prompts) == 2
    assert all(prompts)
    texts = child.call("greedy", prompts=prompts, tokens=12)
    count = sum(map(len, texts))
    agreed = child.call("agreed", prompts=prompts, texts=texts, target_vocab=49152)
    assert sum(map(len, agreed)) == count > 0
    assert share(agreed) >= 0.9  # passes over one row and over two can round differently
    # A small random model repeats its last token, so no two neighbours are equal.
    wrong = [[(token + 7 * place + 1) % 49152 for place, token in enumerate(t)] for t in texts]
    assert share(child.call("agreed", prompts=prompts, texts=wrong, target_vocab=49152)) <= 0.5


def test_an_error_of_a_call_is_raised_and_the_process_answers_the_next_call(child: Child) -> None:
    with pytest.raises(MeasureError, match="the target cannot be measured: .*KV"):
        child.call("seconds", rows=4000, seconds=0.01)
    assert child.call("ready") == "bfloat16"


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    words = "the draft model cannot be measured: draft model .*config"
    with (
        open_child("draft model", None, f"--model-path={tmp_path}", *PLACE) as child,
        pytest.raises(MeasureError, match=words),
    ):
        child.call("ready")


def test_the_end_of_a_process_is_told_with_its_last_words() -> None:
    with (
        open_child("target", None, "--no-such-option") as child,
        pytest.raises(
            MeasureError, match=r"target cannot be measured: .*--model-path \(exit code 2\)"
        ),
    ):
        child.call("ready")
