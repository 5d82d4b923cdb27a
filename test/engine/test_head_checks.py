"""A head that does not fit its model or the settings is refused before anything loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.placement import memory
from sglang_qspec.engine.start import checks
from sglang_qspec.errors import ConfigError
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.hydra import HydraHead
from sglang_qspec.heads.model import Head
from sglang_qspec.heads.new_config import for_target, hydra_for_target
from test.heads.tiny import SHAPE, random_eagle2, random_head, random_hydra, write_target


class Models(NamedTuple):
    """Folders of a target, an EAGLE-3 head and a Hydra head for it."""

    target: Path
    head: Path
    hydra: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The target and heads with random weights."""
    folder = tmp_path_factory.mktemp("models")
    found = Models(write_target(folder / "target"), folder / "head", folder / "hydra")
    for path, made in ((found.head, random_head()), (found.hydra, random_hydra())):
        path.mkdir()
        checkpoint.save(made, path)
    return found


@pytest.mark.parametrize(
    ("changes", "head", "message"),
    [
        ({}, "", None),
        ({}, "none", "--speculative-qspec-head-path is 'none', but must be the folder of a head"),
        (
            {"speculative_draft_model_path": None},
            "",
            "a head needs an endpoint whose sidecar runs it",
        ),
        ({"device": "cuda"}, "", "a head beside a draft model needs a target on a CPU so far"),
    ],
)
def test_a_head_beside_a_draft_model_is_checked(
    folders: Models, changes: dict[str, Any], head: str, message: str | None
) -> None:
    given = with_draft_model(folders, **changes)
    settings = QSpecConfig(head_path=head or str(folders.head))
    if message is None:
        checks.check_draft_model(given, settings)
        given.speculative_draft_model_path = str(folders.head)
        message = "give one head, or a draft model and a head"
    with pytest.raises(ConfigError, match=message):
        checks.check_draft_model(given, settings)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {}, None),
        ({"device": "cuda"}, {"draft_device": "cpu"}, None),
        ({}, {"draft_model_head": "none"}, "-head is 'none', but must be the folder of a head"),
        ({"device": "cuda"}, {}, "a draft model has a head on a CPU alone so far"),
        ({"speculative_draft_model_path": None}, {}, "path is None: it must be a draft model"),
        ({"speculative_draft_model_path": "a/name"}, {}, "must be a folder with a config.json"),
    ],
)
def test_the_head_of_a_draft_model_is_checked(
    folders: Models, changes: dict[str, Any], settings: dict[str, Any], message: str | None
) -> None:
    given = with_draft_model(folders, **changes)
    config = QSpecConfig(**{"draft_model_head": str(folders.hydra), **settings})
    if message is None:
        checks.check_draft_model(given, config)
    else:
        with pytest.raises(ConfigError, match=message):
            checks.check_draft_model(given, config)


def test_other_heads_of_a_draft_model_are_refused(folders: Models, tmp_path: Path) -> None:
    checkpoint.save(HydraHead(hydra_for_target({**SHAPE, "hidden_size": 32}, 80)), tmp_path)
    for path, message in (
        (folders.head, "is a LlamaForCausalLMEagle3, but must be a Hydra head"),
        (tmp_path, "for a draft model with hidden_size 32, but the draft model has 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            checks.check_draft_model(
                with_draft_model(folders), QSpecConfig(draft_model_head=str(path))
            )
    given = arguments(folders)
    with pytest.raises(ConfigError, match="it must be a draft model"):
        checks.check_draft_model(given, QSpecConfig(draft_model_head=str(folders.hydra)))


def with_draft_model(folders: Models, **changes: Any) -> Any:
    """Stand-in for SGLang's arguments with a draft model, which is the target itself."""
    others = {
        "tokenizer_path": str(folders.target),
        "trust_remote_code": False,
        "revision": None,
        "speculative_draft_model_revision": None,
        "skip_tokenizer_init": False,
        "speculative_draft_model_path": str(folders.target),
    }
    return arguments(folders, **{**others, **changes})


def arguments(folders: Models, **changes: Any) -> Any:
    """Stand-in for SGLang's arguments: those that a head's checks read."""
    plain = {
        "speculative_draft_model_path": str(folders.head),
        "model_path": str(folders.target),
        "device": "cpu",
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_head_that_fits_is_accepted(folders: Models, device: str) -> None:
    checks.check_draft_model(arguments(folders, device=device), QSpecConfig())


def test_the_sidecars_memory_has_room_for_what_a_head_loads_of_the_target(
    folders: Models, tmp_path: Path
) -> None:
    own = sum(file.stat().st_size for file in folders.head.glob("*.safetensors"))
    assert (
        memory.draft_bytes(str(folders.head))
        == own + 2 * SHAPE["hidden_size"] * SHAPE["vocab_size"]
    )
    assert memory.draft_bytes(str(folders.target)) == memory.weight_bytes(str(folders.target))
    checkpoint.save(random_eagle2(), tmp_path)
    own = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert memory.draft_bytes(str(tmp_path)) == own + 4 * SHAPE["hidden_size"] * SHAPE["vocab_size"]
    assert memory.draft_bytes("some/name") is None


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"mode": "queue"}, "--speculative-qspec-mode is 'queue' and .* the head"),
        ({}, {"prefill_drafts": "on"}, "--speculative-qspec-prefill-drafts is 'on' and"),
        ({"model_path": "some/name"}, {}, "--model-path must be a folder with a config.json"),
    ],
)
def test_settings_that_do_not_fit_a_head(
    folders: Models, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checks.check_draft_model(arguments(folders, **changes), QSpecConfig(**settings))


def test_a_head_at_an_endpoint_is_checked(folders: Models) -> None:
    given = arguments(folders, speculative_draft_model_path=None)
    checks.check_draft_model(given, QSpecConfig(endpoint="ipc:///x", head_path=str(folders.head)))
    for more, message in (
        ({"head_path": "none"}, "--speculative-qspec-head-path is 'none', but must be the folder"),
        ({"prefill_drafts": "on"}, "--speculative-qspec-prefill-drafts is 'on'"),
    ):
        settings: Any = {"endpoint": "ipc:///x", "head_path": str(folders.head), **more}
        with pytest.raises(ConfigError, match=message):
            checks.check_draft_model(given, QSpecConfig(**settings))


def test_a_head_of_another_target_is_refused(folders: Models, tmp_path: Path) -> None:
    other = Head(for_target({**SHAPE, "hidden_size": 32}, 80))
    checkpoint.save(other, tmp_path)
    given = arguments(folders, speculative_draft_model_path=str(tmp_path))
    with pytest.raises(
        ConfigError, match="for a target with hidden_size 32, but the target has 64"
    ):
        checks.check_draft_model(given, QSpecConfig())
