"""A model of a kind that QSPEC does not support is refused by its properties, before SGLang starts.

The checkpoints have a configuration and a tokenizer; no refusal needs weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig
from transformers import CONFIG_MAPPING

from sglang_qspec.engine.boundary import refusal as engine_refusal
from sglang_qspec.engine.sidecar import model_pair
from sglang_qspec.engine.start import families, preflight
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.models import DemoModels

SCORES = "an embedding or reward model"
ENCODER = "a model with cross-attention to an encoder"
STATE = "a model with recurrent layers"
MTP = "an MTP layer"

REFUSED = [
    ("llama", "LlamaEmbeddingModel", SCORES),
    ("llama", "LlamaForSequenceClassification", SCORES),
    ("llama", "NoSuchLlamaForTokenClassification", SCORES),
    ("qwen2", "Qwen2ForRewardModel", SCORES),
    ("qwen3", "Qwen3Model", SCORES),
    ("bert", "BertModel", SCORES),
    ("clip", "CLIPModel", SCORES),
    ("bart", "BartForConditionalGeneration", ENCODER),
    ("mllama", "MllamaForConditionalGeneration", ENCODER),
    ("t5", "T5ForConditionalGeneration", ENCODER),
    ("whisper", "WhisperForConditionalGeneration", ENCODER),
    ("bamba", "BambaForCausalLM", STATE),
    ("falcon_h1", "FalconH1ForCausalLM", STATE),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM", STATE),
    ("jamba", "JambaForCausalLM", STATE),
    ("mamba2", "Mamba2ForCausalLM", STATE),
    ("minimax", "MiniMaxForCausalLM", STATE),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", STATE),
    ("qwen3_next", "Qwen3NextForCausalLM", STATE),
    ("recurrent_gemma", "RecurrentGemmaForCausalLM", STATE),
    ("glm4_moe", "Glm4MoeForCausalLMNextN", MTP),
    ("qwen3_next", "Qwen3NextForCausalLMMTP", MTP),
]
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M*M-",
}
LANGUAGE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
}
NESTED: dict[str, dict[str, Any]] = {
    "DeepseekVL2ForCausalLM": {
        "model_type": "deepseek_vl_v2",
        "vision_config": {"model_type": "vision"},
        "projector_config": {"model_type": "mlp_projector"},
        "candidate_resolutions": [[384, 384]],
    },
    "MultiModalityCausalLM": {
        "model_type": "multi_modality",
        **{
            f"{part}_config": {"model_type": part, "cls": "Part", "params": {}}
            for part in ("vision", "aligner", "gen_vision", "gen_aligner", "gen_head")
        },
    },
}
"""Configurations whose language model is in `language_config`."""


@pytest.fixture(autouse=True)
def _from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have parsed a command line, which ends it with a message."""
    monkeypatch.setattr(engine_refusal, "_on_command_line", False)


def write(folder: Path, content: dict[str, Any], models: DemoModels) -> str:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models.target / name, folder / name)
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def refusal(path: str) -> str:
    """The error of the start of a server with this target."""
    with pytest.raises(ConfigError) as refused:
        preflight.resolved(model_path=path, device="cpu", speculative_algorithm="QSPEC")
    return str(refused.value)


@pytest.mark.parametrize(("model_type", "name", "kind"), REFUSED)
def test_the_start_names_the_model_and_what_is_supported(
    models: DemoModels, tmp_path: Path, model_type: str, name: str, kind: str
) -> None:
    config = CONFIG_MAPPING[model_type](architectures=[name])
    path = write(tmp_path, config.to_dict(), models)
    sentence = refusal(path)
    assert sentence.startswith(f"--model-path is {path}, {kind} ({name}), but QSPEC supports only ")
    with pytest.raises(ConfigError) as doctor:
        preflight.check_family("--model", path)
    assert str(doctor.value) == sentence.replace("--model-path", "--model")


def test_a_pattern_of_layers_with_mamba_is_refused(models: DemoModels, tmp_path: Path) -> None:
    assert STATE in refusal(write(tmp_path, NEMOTRON_H, models))


def test_the_target_of_the_demo_is_of_a_supported_kind(models: DemoModels) -> None:
    families.check("--model-path", str(models.target), ModelConfig(str(models.target)))


@pytest.mark.parametrize("name", NESTED)
def test_a_nested_language_model_is_described(
    models: DemoModels, tmp_path: Path, name: str
) -> None:
    content = {"architectures": [name], "language_config": LANGUAGE, **NESTED[name]}
    path = write(tmp_path, content, models)
    found = model_pair.describe_model(path, path, False, None)
    assert (found.vocab_size, found.architecture) == (49152, name)
    preflight.check_family("--model", path)
