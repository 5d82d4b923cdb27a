"""Writes the tokenizer of a GGUF file, which transformers makes from the metadata.

transformers drops how some tokenizers split text. This module supplies the way of SmolLM, and
refuses files with others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from sglang_qspec.errors import QSpecError, first_line, shown
from sglang_qspec.tools.models.files import read_json, write_json
from sglang_qspec.tools.models.gguf_file import GGUFFile

DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""llama.cpp's names of pre-tokenizers that split numbers into digits, and then text as GPT-2's."""
PLAIN_SPLITS = frozenset({"gpt-2", "phi-2", "mpt", "olmo"})
"""llama.cpp's names of pre-tokenizers that split text as GPT-2's."""
_KEY = "tokenizer.ggml."
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
"""Names of special tokens in files and in configurations."""
_UNUSED = 5
"""Type of tokens that no text has."""


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Turn any error of transformers into a QSpecError, in one line after `what`."""
    try:
        yield
    except QSpecError:
        raise
    except ImportError as error:
        raise QSpecError(
            f"converting needs {error.name or error}: run `pip install 'sglang-qspec[convert]'`"
        ) from error
    except Exception as error:
        raise QSpecError(f"{what}: {first_line(error)}") from error


def special_tokens(file: GGUFFile) -> dict[str, int | None]:
    """The ids of the special tokens for a configuration. Raises QSpecError if one is no token."""
    tokens = file.metadata.get(f"{_KEY}tokens")
    size = file.tensors["token_embd.weight"].shape[0]
    if tokens is not None and (not isinstance(tokens, list) or len(tokens) > size):
        count = len(tokens) if isinstance(tokens, list) else shown(tokens)
        _refuse(file, "tokens", f"{count} tokens", f"at most {size}, the rows of token_embd.weight")
    for name in (*_SPECIAL, "unknown"):
        token_id = file.metadata.get(f"{_KEY}{name}_token_id")
        if token_id is not None and token_id not in range(size):
            _refuse(file, f"{name}_token_id", shown(token_id), f"an id from 0 to {size - 1}")
    return {field: file.metadata.get(f"{_KEY}{name}_token_id") for name, field in _SPECIAL.items()}


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write the files of the tokenizer. Raises QSpecError if transformers would change it."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata = file.metadata
    _check(file)
    special_tokens(file)
    kind, split = metadata[f"{_KEY}model"], metadata.get(f"{_KEY}pre")
    context = metadata[f"{metadata['general.architecture']}.context_length"]
    adds_bos = metadata.get(f"{_KEY}add_bos_token", kind == "llama")
    with foreign(
        f"transformers cannot read the tokenizer of {file.path}, so give the folder of the model's "
        "own tokenizer with --tokenizer"
    ):
        made = PreTrainedTokenizerFast.from_pretrained(
            file.path.parent,
            gguf_file=file.path.name,
            clean_up_tokenization_spaces=False,
            model_max_length=context,
            **({"add_bos_token": True} if adds_bos else {}),
        )
        if kind == "gpt2" and split in DIGIT_SPLITS:
            made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        made.save_pretrained(folder, save_jinja_files=False)
    _remove_foreign_tokens(folder / "tokenizer.json", metadata)
    _remove_circumstances(folder / "tokenizer_config.json")


def _check(file: GGUFFile) -> None:
    """Raise QSpecError unless transformers can make the tokenizer that the metadata describes."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    def get(name: str, default: Any = None) -> Any:
        return file.metadata.get(f"{_KEY}{name}", default)

    kind, split, tokens = get("model"), get("pre"), get("tokens")
    if kind not in ("gpt2", "llama"):
        _refuse(file, "model", shown(kind), "'gpt2' or 'llama'")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        _refuse(file, "tokens", shown(tokens), "a list of texts")
    if len(set(tokens)) < len(tokens):
        twice, _count = Counter(tokens).most_common(1)[0]
        _refuse(file, "tokens", f"{shown(twice)} twice", "each token once")
    if kind == "gpt2" and split not in (
        GGUF_PRE_TOKENIZER_SPLITS.keys() | DIGIT_SPLITS | PLAIN_SPLITS
    ):
        raise QSpecError(
            f"{file.path} has a tokenizer that splits text as {shown(split)}, which is unknown; "
            "give the folder of the model's own tokenizer with --tokenizer"
        )
    for name in ("scores", "token_type"):
        listed = get(name)
        if listed is not None and (not isinstance(listed, list) or len(listed) != len(tokens)):
            _refuse(file, name, shown(listed), f"a list of {len(tokens)} numbers")
    merges = get("merges", [])
    if not isinstance(merges, list):
        _refuse(file, "merges", shown(merges), "a list of texts")
    for merge in merges:
        if not isinstance(merge, str) or merge.count(" ") != 1:
            _refuse(file, "merges", shown(merge), "two tokens with a space between them")
    _check_switches(file, kind)


def _check_switches(file: GGUFFile, kind: str) -> None:
    """Raise QSpecError for what transformers would drop."""
    is_gemma = file.metadata["general.architecture"].startswith("gemma")
    allowed = {
        "add_bos_token": (False, True),
        "add_eos_token": (False,),
        "add_space_prefix": (not is_gemma,) if kind == "llama" else (False, True),
        "remove_extra_whitespaces": (False,),
    }
    for name, values in allowed.items():
        value = file.metadata.get(f"{_KEY}{name}", values[0])
        if value not in values:
            _refuse(file, name, shown(value), f"{values[0]}, or --tokenizer must be given")
    template = file.metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise QSpecError(f"{file.path} has the chat template {shown(template)}, but must be a text")


def _refuse(file: GGUFFile, name: str, value: str, allowed: str) -> NoReturn:
    raise QSpecError(f"{file.path} has {_KEY}{name} {value}, but must have {allowed}")


def _remove_foreign_tokens(path: Path, metadata: dict[str, Any]) -> None:
    """Remove the tokens that the model's own tokenizer does not have.

    llama.cpp adds tokens such as [PAD151643] for ids without a token, and transformers adds
    GPT-2's <|endoftext|> after the last token of a file that lacks it. With them the tokenizer
    would differ from that of the model's target.
    """
    tokens = metadata[f"{_KEY}tokens"]
    kinds = metadata.get(f"{_KEY}token_type", ())
    padding = {
        token
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _UNUSED and re.fullmatch(rf"\[PAD{token_id}\]", token)
    }
    content = read_json(path)
    content["added_tokens"] = [
        added for added in content["added_tokens"] if added["id"] < len(tokens)
    ]
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {
            token: token_id for token, token_id in vocabulary.items() if token not in padding
        }
    write_json(path, content)


def _remove_circumstances(path: Path) -> None:
    """Remove how transformers read the file: with HF_HUB_OFFLINE it writes other values."""
    content = read_json(path)
    for name in ("is_local", "local_files_only"):
        content.pop(name, None)
    write_json(path, content)
