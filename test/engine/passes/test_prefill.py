"""The pass over a prompt verifies drafts of the answer, and changes no answer.

SGLang's scheduler and our worker serve a random Llama in a process of their own (`prefilling`).
"""

from typing import Any

import numpy as np
import pytest
import torch

from sglang_qspec.config import variable
from sglang_qspec.engine.passes.launch import prefill, prefill_hooks
from sglang_qspec.tools.models import DemoModels
from test.engine.cuda.prompts import PROMPTS
from test.preloaded.interpreter import output_of
from test.random_llama import write_random_llama

WIDEST = 8
LENGTH = 24


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def records(
    models: DemoModels, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Any:
    """The records of `prefilling` by case, without and with SGLang's overlap scheduler."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    folder = tmp_path_factory.mktemp("model")
    model = write_random_llama(folder, models, hidden_size=64, intermediate_size=96, **sizes)
    given = [str(model), request.param]
    return output_of("test.engine.passes.prefilling", given, **{variable("prefill_drafts"): "on"})


def overshoot(records: Any) -> int:
    """Number of passes after an end. With overlap SGLang launches one before it knows the end."""
    passes: int = records["plain"]["passes"] - (LENGTH - 1)
    return passes


SAME = (
    *("without", "right", "wrong", "adaptive", "again", "cached"),
    *("without logits", "recovered", "retracted", "after all"),
)


@pytest.mark.parametrize("case", SAME)
def test_the_answers_are_those_without_drafts(records: Any, case: str) -> None:
    assert records[case]["outputs"] == records["plain"]["outputs"]


@pytest.mark.parametrize("case", ["sampled", "penalized"])
def test_seeds_and_penalties_count_positions_from_the_prompt(records: Any, case: str) -> None:
    assert records[case]["outputs"] == records[f"{case} plain"]["outputs"]
    assert min(records[case]["first"]) > 3


def test_right_drafts_join_the_answer_with_its_first_token(records: Any) -> None:
    assert records["plain"]["first"] == records["without"]["first"] == [1] * 5
    assert records["right"]["first"] == [WIDEST] * 5
    assert records["wrong"]["first"] == [4] * 5  # three right tokens and the target's own


def test_answers_take_fewer_passes(records: Any) -> None:
    assert records["right"]["passes"] < records["without"]["passes"] < records["plain"]["passes"]
    assert records["right"]["prefills"] == records["without"]["prefills"]


def test_only_the_last_chunk_of_a_prompt_verifies_drafts(records: Any) -> None:
    """Each prompt has two chunks."""
    assert records["right"]["prefills"] > len(PROMPTS)
    proposed = [own["proposed_tokens"] for own in records["3 tokens"]["records"]]
    assert proposed == [2] * 5


@pytest.mark.parametrize("case", ["right", "wrong", "sampled", "stopped", "2 tokens", "mixed"])
def test_records_and_labels_count_the_tokens_of_the_prefill(records: Any, case: str) -> None:
    record = records[case]
    for output, labels, own in zip(
        record["outputs"], record["labels"], record["records"], strict=True
    ):
        assert len(labels) == len(output)
        if own is None:
            assert set(labels) == {"target"}
            continue
        assert own["accepted_tokens"] == len(labels) - labels.count("target")
        assert own["accepted_tokens"] == sum(own["accepted_by_source"].values())
        gained = len(output) - 1
        assert own["passes"] + own["accepted_tokens"] - gained in (0, 1)
        if own["passes"]:
            assert own["accept_length"] == pytest.approx(gained / own["passes"])


def test_an_answer_ends_inside_the_accepted_tokens(records: Any) -> None:
    assert records["stopped"]["outputs"] == records["stopped plain"]["outputs"]
    assert records["stopped"]["passes"] == overshoot(records)
    for length in (1, 2, 3):
        case = records[f"{length} tokens"]
        assert case["outputs"] == [output[:length] for output in records["plain"]["outputs"]]
        assert case["passes"] == overshoot(records)


def test_an_answer_that_is_aborted_meanwhile_has_one_token(records: Any) -> None:
    assert records["aborted"]["outputs"] == [records["plain"]["outputs"][0][:1]]
    assert records["aborted"]["labels"] == [records["aborted"]["labels"][0][:1]]


def test_only_the_requests_with_drafts_verify_some(records: Any) -> None:
    assert records["mixed"]["outputs"][:2] == records["plain"]["outputs"][:2]
    assert records["mixed"]["first"][:2] == [WIDEST, 1]


def test_a_batch_with_log_probabilities_verifies_no_drafts_in_its_prefill(records: Any) -> None:
    assert records["log probabilities"]["first"] == [1, 1]
    assert records["log probabilities"]["outputs"] == records["plain"]["outputs"][:2]


def test_the_cache_holds_only_what_was_computed(records: Any) -> None:
    """A cached prompt gives the same answer, and no KV slot is lost."""
    assert min(records["cached"]["cached"]) > 0
    assert records["cached"]["first"] == [WIDEST] * 5
    assert len({record["free"] for record in records.values()}) == 1


def test_a_prefill_that_gives_no_logits_of_its_drafts_is_repeated_without(records: Any) -> None:
    assert records["without logits"]["first"] == [1] * 5
    assert records["without logits"]["prefills"] == records["right"]["prefills"]


def test_tokens_of_a_prefill_join_later_if_the_hook_on_its_end_fails(records: Any) -> None:
    assert records["recovered"]["first"] == [1] * 5
    assert records["recovered"]["passes"] < records["without"]["passes"]
    assert records["recovered and stopped"]["outputs"] == records["stopped plain"]["outputs"]
    assert records["recovered and stopped"]["passes"] == 1 + overshoot(records)


def test_a_retracted_request_verifies_drafts_when_its_prompt_runs_again(records: Any) -> None:
    assert records["retracted"]["retracted"] > 0
    assert records["retracted"]["prefills"] > records["right"]["prefills"]
    accepted = [own["accepted_tokens"] for own in records["retracted"]["records"]]
    assert min(accepted) >= LENGTH // 2


def test_places_put_each_chain_behind_its_prompt() -> None:
    order, rows = prefill.places_of(np.array([3, 1, 2]), np.array([2, 0, 1]))
    assert order.tolist() == [0, 1, 2, 6, 7, 3, 4, 5, 8]
    assert rows.tolist() == [2, 3, 4, 5, 7, 8]


def test_states_are_pruned_to_the_chosen_rows_only_while_they_are_asked_for() -> None:
    states = torch.arange(12.0).view(6, 2)

    def prune(*args: Any) -> str:
        return "SGLang's"

    with prefill_hooks.logits_at(torch.tensor([1, 2, 5])):
        found, before, aux, *others = prefill_hooks.prune_states(
            prune, None, states, states + 1, [states, states + 2], None
        )
        packed = prefill_hooks.prune_states(prune, None, states, None, states, None)
    assert found.tolist() == [[2, 3], [4, 5], [10, 11]]
    assert before.tolist() == (found + 1).tolist()
    assert [each.tolist() for each in aux] == [found.tolist(), (found + 2).tolist()]
    assert others == [None, None, []]
    assert packed[1] is None
    assert packed[2].tolist() == found.tolist()
    assert prefill_hooks.prune_states(prune, None, states, None, None, None) == "SGLang's"
