"""Converts the tokenizer in a GGUF file to a Hugging Face fast tokenizer."""

from __future__ import annotations

from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_qspec.errors import QSpecError


def tokenizer(reader: GGUFReader) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits numbers into digits, as SmolLM's does.

    Raises QSpecError if the file has another kind of tokenizer.
    """
    kind = (_contents(reader, "model"), _contents(reader, "pre"))
    if kind != ("gpt2", "smollm"):
        raise QSpecError(f"the GGUF file's tokenizer is {kind!r}, but must be ('gpt2', 'smollm')")
    tokens: list[str] = _contents(reader, "tokens")
    merges = [tuple(merge.split(" ")) for merge in _contents(reader, "merges")]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, _contents(reader, "token_type"), strict=True)
            if type_ == TokenType.CONTROL
        ]
    )
    return made


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`, chat template included."""
    tokens: list[str] = _contents(reader, "tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": field_value(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[_contents(reader, "bos_token_id")],
        "eos_token": tokens[_contents(reader, "eos_token_id")],
        "pad_token": tokens[_contents(reader, "padding_token_id")],
        "unk_token": tokens[_contents(reader, "unknown_token_id")],
        "chat_template": field_value(reader, "tokenizer.chat_template"),
    }


def _contents(reader: GGUFReader, name: str) -> Any:
    return field_value(reader, f"tokenizer.ggml.{name}")


def field_value(reader: GGUFReader, name: str) -> Any:
    """The value of a field. Raises QSpecError if the file does not have it."""
    field = reader.get_field(name)
    if field is None:
        raise QSpecError(f"the GGUF file has no field {name!r}")
    return field.contents()
