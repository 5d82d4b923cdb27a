"""Equal tokenizers are loaded once, and each program has attributes of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from test.preloaded.tokenizers import Tokenizers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text('{"model_type": "llama"}')
    return model


def test_equal_files_are_loaded_once_and_other_files_and_options_again(folder: Path) -> None:
    loads: list[tuple[str, dict[str, Any]]] = []

    def load(path: str, **options: Any) -> SimpleNamespace:
        loads.append((path, options))
        return SimpleNamespace(vocabulary=[], name_or_path=path)

    tokenizers = Tokenizers(load)
    tokenizers.load_for(["-m", "sglang.launch_server", "--model-path", str(folder)])
    tokenizers.load_for([f"--model-path={folder}", "--port", "1"])
    copy = shutil.copytree(folder, folder.with_name("copy"))
    one = tokenizers(str(folder), trust_remote_code=False, revision=None)
    other = tokenizers(str(copy))
    assert loads == [(str(folder), {})]
    assert one.vocabulary is other.vocabulary
    assert (one.name_or_path, other.name_or_path) == (str(folder), str(copy))
    one.chat_template = "another"
    assert not hasattr(tokenizers(str(folder)), "chat_template")
    for changed in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (copy / changed).write_text('{"model_type": "other"}')
        tokenizers(str(copy))
    tokenizers(str(copy), revision="small")
    tokenizers("a/name")
    assert [path for path, _ in loads[1:]] == [str(copy)] * 4 + ["a/name"]


def test_a_model_that_cannot_be_loaded_is_left_to_the_command(tmp_path: Path) -> None:
    loads: list[str] = []
    tokenizers = Tokenizers(loads.append)
    tokenizers.load_for(["--model-path", str(tmp_path)])  # it has no config
    tokenizers.load_for(["--model-path", str(tmp_path / "none")])
    tokenizers.load_for(["--model-path"])
    assert loads == [str(tmp_path / "none")]
