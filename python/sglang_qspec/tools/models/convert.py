"""Converts GGUF files to Hugging Face checkpoints.

The model in the checkpoint has the weights and the configuration of the file, or the file is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.tools.models.cache import build_folder
from sglang_qspec.tools.models.files import (
    TOKENIZER_FILES,
    check_new,
    copy_files,
    read_json,
    write_json,
)
from sglang_qspec.tools.models.gguf_families import FREQUENCIES, configuration, family_of
from sglang_qspec.tools.models.gguf_file import GGUFFile, read
from sglang_qspec.tools.models.gguf_tokenizer import foreign, special_tokens, write_tokenizer
from sglang_qspec.tools.models.gguf_weights import write_weights

DTYPES = ("bfloat16", "float16", "float32")
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Scaling of the rotary positions that all Llama 3.1 to 3.3 models share, without the factor."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}


def convert(
    file: Path, output: Path, *, dtype: str = "bfloat16", tokenizer: Path | None = None
) -> Path:
    """Write the model in a GGUF file as a Hugging Face checkpoint to the new folder `output`.

    Weights are dequantized and rounded to `dtype`. The folder `tokenizer` supplies the tokenizer;
    None takes the tokenizer in the file.

    Raises ConfigError for an argument that is not allowed. Raises QSpecError if the file is damaged
    or of another architecture than FAMILIES, or if the checkpoint would lose something.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}")
    if not file.is_file():
        raise ConfigError(f"the GGUF file is {str(file)!r}, but there is no such file")
    if tokenizer is not None and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"the tokenizer is {str(tokenizer)!r}, but no tokenizer is there")
    check_new(output)
    return build_folder(output, lambda folder: write(file, folder, dtype, tokenizer))


def write(file: Path, folder: Path, dtype: str = "bfloat16", tokenizer: Path | None = None) -> None:
    """As `convert`, into the empty folder `folder`."""
    content = read(file)
    fields = configuration(content)
    if tokenizer is None:
        write_tokenizer(content, folder)
    else:
        copy_files(tokenizer, folder, TOKENIZER_FILES)
    _write_model(content, fields, dtype, folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        write_json(path, _shortest(read_json(path)))


def _write_model(file: GGUFFile, fields: dict[str, Any], dtype: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    given = getattr(torch, dtype)
    with foreign(f"transformers has no model for the configuration of {file.path}"):
        config = AutoConfig.for_model(
            family_of(file).model_type, **fields, **special_tokens(file), dtype=given
        )
        _scale_attention(config)
        if FREQUENCIES in file.tensors:
            _scale_positions(file, config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=given)
    write_weights(file, model, given, folder)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _scale_attention(config: Any) -> None:
    """Set the scale of Gemma's attention, which no file has, as llama.cpp sets it."""
    if hasattr(config, "query_pre_attn_scalar"):
        is_27b = config.num_hidden_layers == _GEMMA_27B_LAYERS.get(config.model_type)
        width = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        config.query_pre_attn_scalar = width


def _scale_positions(file: GGUFFile, config: Any) -> None:
    """Set the rotary positions of Llama 3.1 and later, which the file has as a table of factors.

    Raises QSpecError if another scaling gives the table.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = torch.from_numpy(file.tensors[FREQUENCIES].values())
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = {**_LLAMA3, "rope_theta": theta, "factor": float(table.max())}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
    if table.shape != scaled.shape or not torch.allclose(
        (plain / scaled).float(), table, rtol=1e-3
    ):
        raise QSpecError(
            f"{file.path} has scaled rotary positions ({FREQUENCIES}) that are not Llama 3's, "
            "which cannot be converted; take the model's original checkpoint"
        )


def _shortest(content: Any) -> Any:
    """Replace each number that is a float32 by the shortest decimal for it, such as 1e-05."""
    if isinstance(content, dict):
        return {name: _shortest(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_shortest(value) for value in content]
    if isinstance(content, float) and float(np.float32(content)) == content:
        return float(str(np.float32(content)))
    return content
