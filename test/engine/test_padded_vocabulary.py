"""A server whose target and draft model have one tokenizer and pad their vocabularies differently.

Both have the same random weights and run in float32, so they agree on nearly every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.server.running import COMMON, QSPEC, cores, of_sidecar, state, until
from test.preloaded.server import Server
from test.random_llama import pad_vocabulary, write_random_llama

pytestmark = pytest.mark.server

IDS = 49152
"""Number of token ids of the demo tokenizer, which needs no padding."""
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
PROMPTS = [[504, 3575, 282, 4649, 314], [1000, 2000, 3000], list(range(40, 80))]
SAMPLED = {"temperature": 0.3, "top_p": 0.95, "sampling_seed": 7}


@pytest.fixture(
    scope="module", params=["target", pytest.param("draft", marks=pytest.mark.thorough)]
)
def larger(request: pytest.FixtureRequest) -> str:
    """The model that has 128 ids more than the other."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(
    larger: str, models: DemoModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("padded")
    plain = write_random_llama(folder / "plain", models, max_position_embeddings=2048, **SHAPE)
    # A padded draft model would draft padding nearly always.
    scale = 0.0 if larger == "target" else 4.0
    padded = pad_vocabulary(plain, folder / "padded", IDS + 128, scale=scale)
    target, draft = (padded, plain) if larger == "target" else (plain, padded)
    arguments = [
        *COMMON,
        *(*QSPEC, "--speculative-draft-model-path", str(draft)),
        *("--speculative-qspec-cores", str(cores(1)[0]), "--speculative-qspec-dtype", "float32"),
    ]
    environment = awaiting(tmp_path_factory.mktemp("plugin"))
    with Server(target, arguments, cores=cores(0), environment=environment) as server:
        until(lambda: state(server)["sidecar"] == "ready")
        yield server


def ask(server: Server, prompts: list[list[int]], custom: dict[str, Any], **sampling: Any) -> Any:
    params = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True, **sampling}
    return server.post(
        "/generate",
        {"input_ids": prompts, "sampling_params": {**params, "custom_params": custom}},
    )


def answers(server: Server, prompts: list[list[int]], **sampling: Any) -> list[dict[str, Any]]:
    """The answers with drafts of the sidecar, which must equal the answers without drafts."""
    plain = ask(server, prompts, {"qspec_enabled": False}, **sampling)
    drafted: list[dict[str, Any]] = ask(
        server, prompts, {"qspec_sources": ["queue", "step"]}, **sampling
    )
    assert [a["output_ids"] for a in drafted] == [a["output_ids"] for a in plain]
    return drafted


def accepted(answer: dict[str, Any]) -> int:
    return of_sidecar(answer["meta_info"]["qspec"]["accepted_by_source"])


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_accepted_and_change_no_answer(
    server: Server, sampling: dict[str, float]
) -> None:
    before = state(server)["declined_requests"]
    drafted = answers(server, PROMPTS, **sampling)
    # Wrong noise would hit a token of such flat distributions once in many thousand times.
    assert sum(map(accepted, drafted)) > len(PROMPTS)
    assert max(token for answer in drafted for token in answer["output_ids"]) < IDS
    assert state(server)["declined_requests"] == before


@pytest.mark.parametrize("larger", ["target"], indirect=True)
@pytest.mark.parametrize("where", ["prompt", "output"])
def test_a_request_with_an_id_that_the_draft_model_lacks_gets_the_same_answer_without_its_drafts(
    server: Server, where: str
) -> None:
    before = state(server)["declined_requests"]
    if where == "prompt":
        (answer,) = answers(server, [[504, IDS + 5, 282]])
    else:
        (answer,) = answers(server, PROMPTS[:1], logit_bias={str(IDS + 5): 1000.0})
        assert answer["output_ids"] == [IDS + 5] * 32
    assert accepted(answer) == 0
    # The sidecar would not answer such a Submit, so the server must decline the request itself.
    assert f"token id {IDS + 5}, but the draft model has only ids below {IDS}" in server.log
    after = state(server)
    assert after["declined_requests"] == before + 1
    assert after["sidecar"] == "ready"
    assert after["sidecar_restarts"] == after["dropped_messages"]["malformed"] == 0
    assert sum(map(accepted, answers(server, PROMPTS))) > 0
