"""The doctor finds checkpoints that are damaged, and models that do not fit each other."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from sglang_qspec.tools.doctor import models as checks
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, Status, Verdict, examine
from sglang_qspec.tools.models import DemoModels
from sglang_qspec.tools.models.files import INDEX


@pytest.fixture
def copy(models: DemoModels, tmp_path: Path) -> Path:
    """A copy of the demo's draft model, to be damaged."""
    folder = tmp_path / "copy"
    shutil.copytree(models.draft, folder)
    return folder


def of(path: Path | str) -> Verdict:
    case = Case(model=str(path))
    finding: Finding = examine("target", lambda: checks.target(case))
    assert (case.target is None) == (finding.verdict.status is Status.FAILURE)
    return finding.verdict


def test_a_complete_checkpoint_is_described(models: DemoModels) -> None:
    assert of(models.target) == Verdict(
        Status.OK, "LlamaForCausalLM, 49152 token ids, 0.3 GiB of weights"
    )


def test_a_relative_folder_may_have_a_name_like_one_on_the_hub(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent.parent)
    assert of(f"{copy.parent.name}/{copy.name}").status is Status.OK


def test_a_missing_folder_is_named() -> None:
    verdict = of("/nowhere/model")
    assert verdict.status is Status.FAILURE
    assert verdict.found == "/nowhere/model is no folder"


def test_a_model_that_is_on_no_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    verdict = of("nobody/no-such-model")
    assert verdict.status is Status.FAILURE
    assert "nobody/no-such-model" in verdict.found
    assert "\n" not in verdict.found


def test_an_unreachable_hub_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at the port of this hub."""
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    verdict = of("nobody/no-such-model")
    assert verdict.status is Status.FAILURE
    assert "the hub does not give it" in verdict.found
    assert "refused" in verdict.found
    assert "HF_HUB_OFFLINE=1" in verdict.advice


def test_a_config_that_is_no_json_is_named(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "llama",')
    assert "config.json cannot be read" in of(copy).found
    (copy / "config.json").write_text("[]")
    assert of(copy).status is Status.FAILURE
    (copy / "config.json").unlink()
    assert "must be the folder of a local checkpoint with a config.json" in of(copy).found
    (copy / "config.json").mkdir()  # cannot be read, whoever reads it
    assert of(copy).status is Status.FAILURE


def test_a_model_family_that_nothing_knows_is_a_failure(copy: Path) -> None:
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**content, "model_type": "unheard_of"}))
    verdict = of(copy)
    assert verdict.status is Status.FAILURE
    assert "unheard_of" in verdict.found


def test_a_refused_family_is_named_as_target_and_as_draft(copy: Path) -> None:
    """The server says the same sentence (test/engine/families/test_refused.py)."""
    from transformers import FalconH1Config

    FalconH1Config(architectures=["FalconH1ForCausalLM"]).save_pretrained(copy)
    assert f"--model is {copy}, a model with recurrent layers (FalconH1" in of(copy).found
    case = Case(draft_model=str(copy))
    finding = examine("draft model", lambda: checks.draft(case))
    assert "--draft-model is" in finding.verdict.found
    assert case.draft is None


def test_cut_weights_are_named(copy: Path) -> None:
    weights = copy / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    assert "model.safetensors cannot be read" in of(copy).found
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "model.safetensors cannot be read" in of(copy).found
    weights.unlink()
    assert "has no .safetensors files" in of(copy).found


def test_a_part_that_only_the_index_names_is_missing(copy: Path) -> None:
    parts = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / INDEX).write_text(json.dumps({"weight_map": parts}))
    words = "names 'model-00002-of-00002.safetensors', but there is no such file"
    assert words in of(copy).found
    (copy / INDEX).write_text("[]")
    assert of(copy).status is Status.FAILURE


def pair(target: Path, draft: Path) -> tuple[Case, Verdict]:
    case = Case(model=str(target), draft_model=str(draft))
    assert checks.target(case).status is checks.draft(case).status is Status.OK
    return case, checks.tokenizers(case)


def test_the_first_token_that_differs_is_named(models: DemoModels, copy: Path) -> None:
    case, verdict = pair(models.target, models.draft)
    assert case.tokenizers_fit
    assert verdict.found == "equal on all tokens, with 49152 ids in both models"
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {token_id: token for token, token_id in vocabulary.items()}
    vocabulary[names[1000]], vocabulary[names[1001]] = 1001, 1000
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    case, verdict = pair(models.target, copy)
    assert not case.tokenizers_fit
    assert verdict.status is Status.FAILURE
    assert f"token id 1000 is {names[1001]!r} there" in verdict.found
    assert f"qspec models quantize --model {models.target} --bits 4" in verdict.advice


def test_vocabularies_may_be_padded_differently(models: DemoModels, copy: Path) -> None:
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**content, "vocab_size": 49280}))
    case, verdict = pair(models.target, copy)
    assert case.tokenizers_fit
    assert verdict.status is Status.OK
    assert "padded to 49152 and 49280 ids" in verdict.found
