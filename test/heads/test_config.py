"""A head's configuration is read completely, and refused by name where it is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.config import HeadKind, default_layers, digest, is_head, read
from sglang_qspec.heads.new_config import for_target, hydra_for_target
from test.heads.tiny import EAGLE2, SHAPE

GIVEN = {**for_target(SHAPE, 80).fields}
"""A configuration that is allowed."""


def written(folder: Path, **changed: Any) -> Path:
    content = {name: value for name, value in {**GIVEN, **changed}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_written_configuration_is_read_again(tmp_path: Path) -> None:
    found = read(written(tmp_path))
    assert found == for_target(SHAPE, 80)
    assert (found.layers, found.states) == ((0, 2, 4), 3)
    assert is_head(found.fields)
    assert not is_head(SHAPE)


def test_published_heads_leave_much_out(tmp_path: Path) -> None:
    found = read(written(tmp_path, eagle_config=None, draft_vocab_size=None))
    assert (found.layers, found.states, found.draft_vocab_size) == (None, 3, 260)
    assert found.layers_of(32) == default_layers(32) == (1, 15, 28)
    found = read(written(tmp_path, target_hidden_size=128))
    assert (found.target_hidden_size, found.hidden_size) == (128, 64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "must be one of LlamaForCausalLMEagle3, LlamaForCausalLMEagle, MedusaModel, HydraHead$",
        ),
        ({"architectures": "x"}, r"\$\.architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but only 1 is supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        ({"use_aux_norm": True}, "fc_norm is True"),
        ({"norm_output": True}, "norm_output is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": None, "num_aux_hidden_states": 4}, "must name the layers"),
        ({"num_aux_hidden_states": 17}, "num_aux_hidden_states is 17, but must be from 1 to 16"),
        ({"num_aux_hidden_states": 2}, r"is \[0, 2, 4\], but must be 2 different layers"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]}},
            "3 different layers from 0 on",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}},
            "in rising order",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, **changed))


def test_an_eagle_2_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE2, "tie_word_embeddings": True}))
    found = read(tmp_path)
    assert (found.kind, found.states, found.layers) == (HeadKind.EAGLE2, 1, None)
    assert found.draft_vocab_size == found.vocab_size == 260
    found.check_target({**SHAPE, "num_hidden_layers": 1})  # it reads no layer below the last one
    with pytest.raises(ConfigError, match="hidden_size 64, but the target has 128"):
        found.check_target({**SHAPE, "hidden_size": 128})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but only 1 is supported"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100, but only 260 is supported"),
        ({"hot_vocab_size": 100}, "hot_vocab_size is 100, but only 260 is supported"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, but only 64 is supported"),
    ],
)
def test_what_an_eagle_2_head_cannot_have_is_named(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE2, **changed}))
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"medusa_num_heads": 17}, "medusa_num_heads is 17, but must be from 1 to 16"),
        ({"architectures": ["MedusaModel"]}, "medusa_num_heads is 0, but must be from 1 to 16"),
        ({"medusa_num_heads": 2}, "has no hidden_size and no vocab_size, and the folder no weig"),
        (
            {"num_heads": 2, "vocab_size": 260, "hidden_size": 64, "truncated_vocab_size": 100},
            "truncated_vocab_size is 100, but only 260 is supported",
        ),
    ],
)
def test_what_medusa_heads_cannot_have_is_named(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    content = {"architectures": ["MedusaModel"], **content}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft_vocab_size": 261}, "draft_vocab_size is 261, but must be at most vocab_size, 260"),
        ({"intermediate_size": 0}, "Expected `int` >= 1 - at `\\$.intermediate_size`"),
        ({"hidden_size": "64"}, "Expected `int`, got `str` - at `\\$.hidden_size`"),
    ],
)
def test_what_a_hydra_head_cannot_have_is_named(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    content = dict(hydra_for_target(SHAPE, 80).fields)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read(tmp_path) == hydra_for_target(SHAPE, 80)
    (tmp_path / "config.json").write_text(json.dumps({**content, **changed}))
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_medusa_heads_of_vllm_and_of_the_authors(tmp_path: Path) -> None:
    of_vllm = {"architectures": ["MedusaModel"], "num_heads": 3, "num_hidden_layers": 2}
    of_authors = {"medusa_num_heads": 3, "medusa_num_layers": 2}
    for content in (of_vllm, of_authors):
        assert is_head(content)
        sizes = {"hidden_size": 64, "vocab_size": 260}
        (tmp_path / "config.json").write_text(json.dumps({**content, **sizes}))
        found = read(tmp_path)
        assert (found.kind, found.heads, found.head_layers) == (HeadKind.MEDUSA, 3, 2)
        found.check_target({**SHAPE, "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match="vocab_size 260, but the target has 300"):
        found.check_target({**SHAPE, "vocab_size": 300})


def test_the_digest_tells_heads_apart(tmp_path: Path) -> None:
    weights = written(tmp_path) / "model.safetensors"
    weights.write_bytes(b"x")
    first = digest(tmp_path)
    assert digest(None) == ""
    assert first == digest(tmp_path) != ""
    weights.write_bytes(b"y")
    assert digest(tmp_path) != first
    weights.write_bytes(b"x")
    written(tmp_path, bos_token_id=1)
    assert digest(tmp_path) != first
    with pytest.raises(ConfigError, match=r"config\.json"):
        digest(tmp_path / "none")


def test_the_digest_covers_weights_in_the_format_of_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    weights = tmp_path / "pytorch_model.bin"
    weights.write_bytes(b"weights")
    first = digest(tmp_path)
    weights.write_bytes(b"others")
    assert digest(tmp_path) != first


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": 128}, "hidden_size 64, but the target has 128"),
        ({"vocab_size": 300}, "vocab_size 260, but the target has 300"),
        ({"num_hidden_layers": 3}, "reads layer 4 of its target, but must read layers below"),
    ],
)
def test_a_head_of_another_target_is_refused(changed: dict[str, Any], message: str) -> None:
    head = for_target(SHAPE, 80)
    head.check_target(SHAPE)
    with pytest.raises(ConfigError, match=message):
        head.check_target({**SHAPE, **changed})


@pytest.mark.parametrize("layers", [[5], [-1], [1, 1]])
def test_a_new_head_reads_layers_of_its_target(layers: list[int]) -> None:
    with pytest.raises(ConfigError, match="different layers from 0 to 4"):
        for_target(SHAPE, 80, layers)


def test_a_target_without_decoder_layers() -> None:
    with pytest.raises(ConfigError, match="no intermediate_size"):
        for_target({**SHAPE, "intermediate_size": None}, 80)
