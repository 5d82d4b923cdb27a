"""Every pass of a server runs in a graph, and computes the same results as without graphs.

SGLang's scheduler, its runner of CUDA graphs and our worker run on the CPU with a random Llama.
`called_graphs` describes the stand-ins for the graphs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from sglang_qspec.tools.models import DemoModels
from test.engine.cuda.prompts import PROMPTS
from test.preloaded.interpreter import output_of
from test.random_llama import write_random_llama

CASES = (
    "off",
    "width 2",
    "width 4",
    "width 8",
    "one request at width 8",
    "adaptive",
    "halves",
    "penalised",
    "mixed",
    "switched off",
)


@pytest.fixture(scope="module")
def model(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    folder = tmp_path_factory.mktemp("model")
    return write_random_llama(folder, models, hidden_size=64, intermediate_size=96, **sizes)


def serve(model: Path, kind: str) -> Any:
    """The output of `serving` for the model."""
    return output_of("test.engine.cuda.serving", [str(model), kind])


@pytest.fixture(scope="module")
def records(model: Path) -> dict[bool, Any]:
    """The record of each case, with graphs (True) and without (False)."""
    return {True: serve(model, "trees"), False: serve(model, "eager")}


@pytest.mark.parametrize("case", CASES)
def test_no_pass_is_eager(records: dict[bool, Any], case: str) -> None:
    record = records[True][case]
    assert record["passes"]
    assert all(in_graph for _, _, in_graph in record["passes"])
    assert record["eager_passes"] == 0
    assert records[False][case]["eager_passes"] == len(records[False][case]["passes"])


@pytest.mark.parametrize("case", CASES)
def test_the_outputs_are_those_without_graphs(records: dict[bool, Any], case: str) -> None:
    with_graphs, without = records[True][case], records[False][case]
    assert with_graphs["outputs"] == without["outputs"]
    assert len(with_graphs["logprobs"]) == (case in ("mixed", "switched off"))
    for found, expected in zip(with_graphs["logprobs"], without["logprobs"], strict=True):
        # The last pass may have accepted tokens after the end of the output.
        length = min(map(len, with_graphs["outputs"]))
        assert found[:length] == pytest.approx(expected[:length], abs=1e-4)


def test_ragged_passes_run_in_graphs_and_change_no_output(
    records: dict[bool, Any], model: Path
) -> None:
    found = serve(model, "ragged")
    for case in CASES:
        assert found[case]["eager_passes"] == 0
        assert found[case]["outputs"] == records[False][case]["outputs"]
    widths = {width for width, _, _ in found["adaptive"]["passes"]}
    assert widths - {1, 2, 4, 8}  # the longest chain of a pass is any number of tokens


def test_drafts_change_no_greedy_output(records: dict[bool, Any]) -> None:
    found = records[True]
    for case in ("width 2", "width 4", "width 8", "adaptive", "halves"):
        assert found[case]["outputs"] == found["off"]["outputs"]
        assert found[case]["accepted"] > 0


def test_passes_have_the_widths_and_batches_that_the_cases_ask_for(
    records: dict[bool, Any],
) -> None:
    shapes = {
        case: {(width, requests) for width, requests, _ in record["passes"]}
        for case, record in records[True].items()
    }
    for case in ("off", "switched off"):
        assert {width for width, _ in shapes[case]} == {1}
    for width in (2, 4, 8):
        assert (width, 5) in shapes[f"width {width}"]  # padded to six requests
    assert {requests for _, requests in shapes["halves"]} >= {2, 3}
    assert {width for width, _ in shapes["adaptive"]} <= {1, 2, 4, 8}
    assert max(width for width, _ in shapes["mixed"]) > 1


def test_ragged_chains_run_in_graphs_of_their_total_of_tokens(model: Path) -> None:
    found = serve(model, "chains")
    assert found["tiers"] == [8, 16, 32, 48]
    assert found["widths"] == [1]
    assert found["plain"]
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert len(found["passes"]) == 5
    for each in found["passes"]:
        assert each["in_graph"]
        expected: list[int] = []
        for row, chain in zip(each["rows"], each["chains"], strict=True):
            with torch.inference_mode():
                logits = network(torch.tensor([PROMPTS[row] + chain])).logits[0]
            expected += logits[-len(chain) :].argmax(-1).tolist()
        assert each["next"] == expected
