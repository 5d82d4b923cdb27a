"""Converts GGUF files to Hugging Face checkpoints, with transformers' reader for such files.

transformers drops what it does not know: how the tokenizer splits text, and scaled rotary
positions. This module supplies the ones of SmolLM and Llama 3, and refuses files with others.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.models.cache import build_folder
from sglang_qspec.models.files import TOKENIZER_FILES, check_new, copy_files

DTYPES = ("bfloat16", "float16", "float32")
DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""llama.cpp's names of pre-tokenizers that split numbers into digits, and then text as GPT-2's."""
PLAIN_SPLITS = frozenset({"gpt-2", "phi-2", "mpt", "olmo"})
"""llama.cpp's names of pre-tokenizers that split text as GPT-2's."""
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Scaling of the rotary positions that all Llama 3.1 to 3.3 models share, without the factor."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3_text": 62}
_UNUSED = 5
"""Type of tokens in GGUF files that no text has."""
_FREQUENCIES = "rope_freqs.weight"


def convert(
    file: Path, output: Path, *, dtype: str = "bfloat16", tokenizer: Path | None = None
) -> Path:
    """Write the model in a GGUF file as a Hugging Face checkpoint to the new folder `output`.

    Weights are dequantized and rounded to `dtype`. The folder `tokenizer` supplies the tokenizer;
    None takes the tokenizer in the file.

    Raises ConfigError for an argument that is not allowed. Raises QSpecError if the file is not a
    GGUF file, transformers does not read its architecture, or the checkpoint would lose something.
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
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, names = read_gguf_metadata(str(file), ("tokenizer.ggml.tokens",))
    except (ValueError, IndexError, struct.error) as error:
        raise QSpecError(f"{file} cannot be read as a GGUF file: {error}") from None
    _check_positions(file, metadata, names)
    if tokenizer is None:
        _write_tokenizer(file, metadata, folder)
    else:
        copy_files(tokenizer, folder, TOKENIZER_FILES)
    _write_model(file, dtype, folder, scaled=_FREQUENCIES in names)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists():
            path.write_text(json.dumps(_shortest(json.loads(path.read_text())), indent=2) + "\n")


def _check_positions(file: Path, metadata: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise QSpecError if the model's rotary positions are scaled in an unknown way."""
    architecture = metadata["general.architecture"]
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    unknown = [name for name in names if name.startswith("rope_") and name != _FREQUENCIES]
    if (scaling != "none" and architecture != "gpt-oss") or unknown:
        found = f"the tensor {unknown[0]}" if unknown else f"the scaling {scaling!r}"
        raise QSpecError(
            f"{file} has scaled rotary positions ({found}), which cannot be converted; "
            "take the model's original checkpoint"
        )


def _write_model(file: Path, dtype: str, folder: Path, *, scaled: bool) -> None:
    import torch

    try:
        from transformers import AutoModelForCausalLM, GgufConfig

        model, loading = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except ImportError as error:
        raise QSpecError(
            "converting needs accelerate: run `pip install 'sglang-qspec[convert]'`"
        ) from error
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise QSpecError(f"transformers cannot convert {file}: {reason}") from error
    if loading["missing_keys"]:
        raise QSpecError(
            f"{file} has no weights for {', '.join(sorted(loading['missing_keys'])[:3])}, "
            "so the model would be incomplete"
        )
    model.config.vocab_size = model.get_input_embeddings().weight.shape[0]
    _scale_attention(model.config)
    if scaled:
        _scale_positions(file, model.config)
    model.config._name_or_path = ""
    model.save_pretrained(folder)


def _scale_attention(config: Any) -> None:
    """Set the scale of Gemma's attention, which no file has, as llama.cpp sets it."""
    if hasattr(config, "query_pre_attn_scalar"):
        is_27b = config.num_hidden_layers == _GEMMA_27B_LAYERS.get(config.model_type)
        width = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        config.query_pre_attn_scalar = width


def _scale_positions(file: Path, config: Any) -> None:
    """Set the rotary positions of Llama 3.1 and later, which the file has as a table of factors.

    Raises QSpecError if another scaling gives the table.
    """
    import torch
    from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = load_gguf_state_dict(GgufHeader.from_file(str(file)))[_FREQUENCIES][...].float()
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = {**_LLAMA3, "rope_theta": theta, "factor": float(table.max())}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
    if table.shape != scaled.shape or not torch.allclose(
        (plain / scaled).float(), table, rtol=1e-3
    ):
        raise QSpecError(
            f"{file} has scaled rotary positions that are not Llama 3's, which cannot be "
            "converted; take the model's original checkpoint"
        )


def _write_tokenizer(file: Path, metadata: dict[str, Any], folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind = metadata.get("tokenizer.ggml.model")
    split = metadata.get("tokenizer.ggml.pre")
    known = GGUF_PRE_TOKENIZER_SPLITS.keys() | DIGIT_SPLITS | PLAIN_SPLITS
    if kind == "gpt2" and split not in known:
        raise QSpecError(
            f"{file} has a tokenizer that splits text as {split!r}, which is unknown; "
            "give the folder of the model's own tokenizer with --tokenizer"
        )
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    architecture = metadata["general.architecture"]
    given = {"model_max_length": metadata.get(f"{architecture}.context_length")}
    try:
        made = PreTrainedTokenizerFast.from_pretrained(
            file.parent,
            gguf_file=file.name,
            clean_up_tokenization_spaces=False,
            **{name: value for name, value in given.items() if value is not None},
            **({"add_bos_token": True} if adds_bos else {}),
        )
    except (ValueError, KeyError) as error:
        raise QSpecError(
            f"transformers cannot read the tokenizer of {file}: {error}; "
            "give the folder of the model's own tokenizer with --tokenizer"
        ) from error
    if kind == "gpt2" and split in DIGIT_SPLITS:
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    made.save_pretrained(folder, save_jinja_files=False)
    _remove_foreign_tokens(folder / "tokenizer.json", metadata)


def _remove_foreign_tokens(path: Path, metadata: dict[str, Any]) -> None:
    """Remove the tokens that the model's own tokenizer does not have.

    llama.cpp adds tokens such as [PAD151643] for ids without a token, and transformers adds
    GPT-2's <|endoftext|> after the last token of a file that lacks it. With them the tokenizer
    would differ from that of the model's target.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    padding = {
        token
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _UNUSED and re.fullmatch(rf"\[PAD{token_id}\]", token)
    }
    content = json.loads(path.read_text())
    content["added_tokens"] = [
        added for added in content["added_tokens"] if added["id"] < len(tokens)
    ]
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {
            token: token_id for token, token_id in vocabulary.items() if token not in padding
        }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _shortest(content: Any) -> Any:
    """Replace each number that is a float32 by the shortest decimal for it, such as 1e-05."""
    import numpy as np

    if isinstance(content, dict):
        return {name: _shortest(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_shortest(value) for value in content]
    if isinstance(content, float) and float(np.float32(content)) == content:
        return float(str(np.float32(content)))
    return content
