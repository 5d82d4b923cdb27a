"""The doctor finds checkpoints that are damaged, and models that do not fit each other."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.hydra import HydraHead
from sglang_qspec.heads.model import Head
from sglang_qspec.heads.new_config import for_target, hydra_for_target
from sglang_qspec.tools.doctor import models as checks
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.checks import CHECKS
from sglang_qspec.tools.doctor.finding import Finding, Status, examine
from sglang_qspec.tools.models import DemoModels
from sglang_qspec.tools.models.files import INDEX
from test.heads.tiny import SHAPE, random_head, random_hydra, write_target

WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(models: DemoModels, tmp_path: Path) -> Path:
    """A copy of the demo's draft model, to be damaged."""
    folder = tmp_path / "copy"
    shutil.copytree(models.draft, folder)
    return folder


def of(path: Path | str) -> Finding:
    case = Case(model=str(path))
    finding = examine("target", lambda: checks.target(case))
    assert (case.target is None) == (finding.status is Status.FAILURE)
    return finding


def test_a_complete_checkpoint_is_described(models: DemoModels) -> None:
    assert of(models.target) == Finding(
        Status.OK, "LlamaForCausalLM, 49152 token ids, 0.3 GiB of weights", name="target"
    )


def test_a_relative_folder_may_have_a_name_like_one_on_the_hub(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent.parent)
    assert of(f"{copy.parent.name}/{copy.name}").status is Status.OK


def test_a_missing_folder_is_named() -> None:
    finding = of("/nowhere/model")
    assert finding.status is Status.FAILURE
    assert finding.found == "/nowhere/model is no folder"


def test_a_model_that_is_on_no_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = of("nobody/no-such-model")
    assert finding.status is Status.FAILURE
    assert "nobody/no-such-model" in finding.found
    assert "\n" not in finding.found


def test_an_unreachable_hub_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at the port of this hub."""
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    finding = of("nobody/no-such-model")
    assert finding.status is Status.FAILURE
    assert "the hub does not give it" in finding.found
    assert "refused" in finding.found
    assert "HF_HUB_OFFLINE=1" in finding.advice


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda copy: (copy / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda copy: (copy / "config.json").unlink(), "must be the folder of a local checkpoint"),
        (lambda copy: remove_and_make_a_folder(copy / "config.json"), "IsADirectoryError"),
        (lambda copy: (copy / WEIGHTS).write_text("x"), f"{WEIGHTS} cannot be read"),
        (lambda copy: (copy / WEIGHTS).unlink(), "has no .safetensors files"),
        (lambda copy: (copy / INDEX).write_text("[]"), "has the weight_map None"),
    ],
)
def test_damage_is_named(copy: Path, damage: Callable[[Path], object], words: str) -> None:
    """test/tools/models/test_intact.py and test_files.py have the kinds of damage."""
    damage(copy)
    assert words in of(copy).found


def remove_and_make_a_folder(path: Path) -> None:
    """Replace a file by what cannot be read, whoever reads it."""
    path.unlink()
    path.mkdir()


def test_a_model_family_that_nothing_knows_is_a_failure(copy: Path) -> None:
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**content, "model_type": "unheard_of"}))
    finding = of(copy)
    assert finding.status is Status.FAILURE
    assert "unheard_of" in finding.found


def test_a_refused_family_is_named_as_target_and_as_draft(copy: Path) -> None:
    """The server says the same sentence (test/engine/families/test_refused.py)."""
    from transformers import FalconH1Config

    FalconH1Config(architectures=["FalconH1ForCausalLM"]).save_pretrained(copy)
    assert f"--model is {copy}, a model with recurrent layers (FalconH1" in of(copy).found
    case = Case(draft_model=str(copy))
    finding = examine("draft model", lambda: checks.draft(case))
    assert "--draft-model is" in finding.found
    assert case.draft is None


def pair(target: Path, draft: Path) -> tuple[Case, Finding]:
    case = Case(model=str(target), draft_model=str(draft))
    assert checks.target(case).status is checks.draft(case).status is Status.OK
    return case, checks.tokenizers(case)


def test_the_first_token_that_differs_is_named(models: DemoModels, copy: Path) -> None:
    case, finding = pair(models.target, models.draft)
    assert case.tokenizers_fit
    assert finding.found == "equal on all tokens, with 49152 ids in both models"
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {token_id: token for token, token_id in vocabulary.items()}
    vocabulary[names[1000]], vocabulary[names[1001]] = 1001, 1000
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    case, finding = pair(models.target, copy)
    assert not case.tokenizers_fit
    assert finding.status is Status.FAILURE
    assert f"token id 1000 is {names[1001]!r} there" in finding.found
    assert f"qspec models quantize --model {models.target} --bits 4" in finding.advice


def test_vocabularies_may_be_padded_differently(models: DemoModels, copy: Path) -> None:
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**content, "vocab_size": 49280}))
    case, finding = pair(models.target, copy)
    assert case.tokenizers_fit
    assert finding.status is Status.OK
    assert "padded to 49152 and 49280 ids" in finding.found


def test_a_head_is_checked_against_its_target(tmp_path: Path) -> None:
    target, head = write_target(tmp_path / "target"), tmp_path / "head"
    head.mkdir()
    checkpoint.save(random_head(), head)
    case = Case(model=str(target), draft_model=str(head))
    assert checks.draft(case).found == "a head that drafts 80 of 260 token ids"
    assert case.tokenizers_fit
    (head / WEIGHTS).unlink()
    assert checks.draft(case).status is Status.FAILURE
    checkpoint.save(Head(for_target({**SHAPE, "hidden_size": 32}, 80)), head)
    finding = checks.draft(Case(model=str(target), draft_model=str(head)))
    assert "with hidden_size 32, but the target has 64" in finding.found
    assert "qspec models train-head" in finding.advice


def test_the_head_of_a_draft_model_is_checked_against_it(tmp_path: Path) -> None:
    draft, head = write_target(tmp_path / "draft"), tmp_path / "head"
    head.mkdir()
    checkpoint.save(random_hydra(), head)
    settings = QSpecConfig(draft_model_head=str(head))
    case = Case(model="target", draft_model=str(draft), settings=settings)
    assert checks.draft_head(case).found == "a head that drafts 80 of 260 token ids"
    checkpoint.save(HydraHead(hydra_for_target({**SHAPE, "hidden_size": 32}, 80)), head)
    finding = checks.draft_head(case)
    assert "for a draft model with hidden_size 32" in finding.found
    assert "train-head --model" in finding.advice
    assert "--kind hydra" in finding.advice
    (head / WEIGHTS).unlink()
    (head / "config.json").unlink()
    assert "does not fit" in checks.draft_head(case).found


def test_a_head_beside_a_draft_model_is_checked_too(tmp_path: Path) -> None:
    target, head = write_target(tmp_path / "target"), tmp_path / "head"
    head.mkdir()
    checkpoint.save(random_head(), head)
    case = Case(model=str(target), settings=QSpecConfig(head_path=str(head)))
    (check,) = [each for each in CHECKS if each.name == "head"]
    assert check.applies(case)
    assert not check.applies(Case(model=str(target), settings=QSpecConfig()))
    assert check.run(case).status is Status.OK
    (head / WEIGHTS).unlink()
    assert check.run(case).status is Status.FAILURE
