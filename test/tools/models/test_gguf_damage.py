"""A damaged GGUF file is refused in one line, or gives the weights that it still has."""

from __future__ import annotations

import random
import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.models import convert
from test.tools.models.gguf_files import BPE, write_gguf
from test.tools.models.test_gguf_families import model_of

SPARE_BYTES = 1 << 30
"""Address space that a conversion may take beyond what the process has."""
EXTREMES = (0, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a model whose embeddings are not tied, with a bias and quantized weights."""
    folder = tmp_path_factory.mktemp("whole")
    return write_gguf(folder / "model.gguf", model_of("qwen2"), "qwen2", BPE, quantized="Q8_0")


@pytest.fixture(scope="module")
def names(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tensor of the file of each weight, found by their values."""
    made = load_file(convert(whole, tmp_path_factory.mktemp("made") / "m", dtype="float32") / FILE)
    held = values_of(whole)
    return {
        name: next(key for key, value in held.items() if torch.equal(value, weight))
        for name, weight in made.items()
    }


FILE = "model.safetensors"


def values_of(file: Path) -> dict[str, torch.Tensor]:
    """The weights as llama.cpp's package reads them."""
    return {
        tensor.name: torch.from_numpy(
            np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        ).reshape(*map(int, tensor.shape[::-1]))
        for tensor in GGUFReader(file).tensors
    }


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Makes a huge allocation fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def mutate(content: bytearray, rng: random.Random, header: int) -> None:
    """Damage a file at random. Most damage is in the first `header` bytes."""
    kind = rng.randrange(8)
    end = header if rng.random() < 0.8 else len(content)
    place = rng.randrange(end)
    if kind == 0:
        del content[place:]
    elif kind == 1:
        del content[place : place + rng.randrange(1, 64)]
    elif kind == 2:
        content[place:place] = rng.randbytes(rng.randrange(1, 64))
    elif kind == 3:
        content[place] ^= 1 << rng.randrange(8)
    elif kind == 4:
        content[place : place + 4] = rng.randbytes(4)
    elif kind == 5:
        content[place : place + 4] = struct.pack("<I", rng.choice(EXTREMES) & 0xFFFFFFFF)
    elif kind == 6:
        content[place : place + 8] = struct.pack("<Q", rng.choice(EXTREMES))
    else:
        other = rng.randrange(end)
        content[place : place + 16] = content[other : other + 16]


def convert_or_refuse(file: Path, output: Path) -> dict[str, torch.Tensor] | str:
    """The converted weights, or the one line of the refusal."""
    try:
        folder = convert(file, output, dtype="float32")
    except QSpecError as error:
        return str(error)
    weights = load_file(folder / FILE)
    shutil.rmtree(folder)
    return weights


@pytest.mark.parametrize(
    "rounds", [200, pytest.param(5000, marks=pytest.mark.thorough)], ids=["some", "many"]
)
def test_random_damage_never_changes_weights_silently(
    whole: Path, names: dict[str, str], tmp_path: Path, little_memory: None, rounds: int
) -> None:
    content = whole.read_bytes()
    header = min(tensor.data_offset for tensor in GGUFReader(whole).tensors)
    file = tmp_path / "damaged.gguf"
    converted = 0
    for seed in range(rounds):
        damaged = bytearray(content)
        mutate(damaged, random.Random(seed), header)
        file.write_bytes(damaged)
        found = convert_or_refuse(file, tmp_path / "made")
        if isinstance(found, str):
            assert "\n" not in found, f"seed {seed}: {found}"
            assert str(file) in found, f"seed {seed}: {found}"
            assert "emory" not in found, f"seed {seed}: {found}"
            continue
        converted += 1
        held = values_of(file)
        assert found.keys() == names.keys(), f"seed {seed}"
        assert held.keys() == set(names.values()), f"seed {seed}"
        assert all(torch.equal(found[name], held[names[name]]) for name in names), f"seed {seed}"
    assert 0 < converted < rounds


def header_of(pairs: bytes = b"", table: bytes = b"", counts: tuple[int, int] = (0, 0)) -> bytes:
    """A file of version 3 with `counts` tensors and metadata keys, without data."""
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + pairs + table


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(kind: int, value: bytes, key: str | bytes = "key") -> bytes:
    """A file with one metadata key of a type, and nothing else."""
    return header_of(text(key) + struct.pack("<I", kind) + value, counts=(0, 1))


def table(
    shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, times: int = 1, name: str = "w"
) -> bytes:
    """A file with a tensor of 128 bytes in its table, `times` times."""
    entry = text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    content = header_of(table=entry * times, counts=(times, 0))
    return content + bytes(-len(content) % 32 + 128)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"GGU", "'magic' takes 4 bytes, but only 3 follow"),
        (b"GGML" + bytes(40), "it begins with b'GGML', but must begin with b'GGUF'"),
        (b"GGUF" + bytes(40), r"the version is 0 .*, but must be 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"the version is 50331648 \(big-endian\)"),
        (header_of(counts=(2**60, 0)), f"the number of tensors is {2**60}, but only 8 bytes"),
        (header_of(counts=(0, 2**60)), f"the number of metadata keys is {2**60}, but only 0"),
        (pair(4, b"\0" * 4, b"\xff"), "the text of 'a metadata key' is not UTF-8"),
        (pair(8, struct.pack("<Q", 2**60)), f"'key' takes {2**60} bytes, but only 0 follow"),
        (pair(8, text(b"\xc3")), "the text of 'key' is not UTF-8"),
        (pair(13, b"\0" * 4), "'key' has a value of the type 13, but must have 0 to 12"),
        (pair(7, b"\2"), "'key' is the truth value 2, but must be 0 or 1"),
        (pair(9, struct.pack("<IQ", 9, 1)), "'key' is an array of arrays"),
        (pair(9, struct.pack("<IQ", 4, 2**62)), f"'key' is {2**62}, but only 0 bytes follow"),
        (pair(9, struct.pack("<IQ", 14, 1)), "'key' has a value of the type 14"),
        (pair(4, struct.pack("<I", 0), "general.alignment"), "general.alignment is 0, but must be"),
        (pair(4, struct.pack("<I", 3), "general.alignment"), "general.alignment is 3, but must be"),
        (pair(8, text("32"), "general.alignment"), "general.alignment is '32', but must be"),
        (
            header_of(2 * (text("key") + struct.pack("<IB", 0, 1)), counts=(0, 2)),
            "the metadata key 'key' occurs twice",
        ),
        (table(shape=()), "'w' has 0 dimensions, but must have 1 to 4"),
        (table(shape=(1,) * 5), "'w' has 5 dimensions, but must have 1 to 4"),
        (table(shape=(0,)), r"'w' has the shape \[0\], but must have positive dimensions"),
        (table(shape=(2**40, 2**40)), r"'w' of the shape .* ends at byte \d+, but the file has"),
        (table(shape=(33,), kind=8), "the last one a multiple of 32"),
        (table(kind=99), "'w' has the type 99, but must have one of BF16, F16, F32"),
        (table(kind=27), "'w' has the type 27, but must have one of"),
        (table(offset=1), "'w' has the offset 1, but it must be a multiple of 32"),
        (table(offset=2**63), "'w' of the shape .* ends at byte"),
        (table(offset=32), "'w' of the shape .* ends at byte"),
        (table(times=2), "the tensor 'w' occurs twice"),
        (table(), "has the architecture None, but can be converted only with one of llama"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content)
    with pytest.raises(QSpecError, match=f"damaged.gguf .*{message}") as caught:
        convert(file, tmp_path / "made")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def damaged_model(
    tmp_path: Path,
    *,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    given = {**BPE, **(tokenizer or {})}
    file = tmp_path / "damaged.gguf"
    return write_gguf(file, model_of("qwen2"), "qwen2", given, fields, tensors)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_count": 1}, "qwen2.block_count 1, but must have 2, as the tensors"),
        ({"block_count": 3}, "qwen2.block_count 3, but must have 2, as the tensors"),
        ({"block_count": 2**31}, f"qwen2.block_count {2**31}, but must have a whole number"),
        ({"block_count": 2**31 - 1}, f"qwen2.block_count {2**31 - 1}, but must have 2"),
        ({"block_count": "2"}, "qwen2.block_count '2', but must have a whole number from 1"),
        ({"block_count": 2.0}, "qwen2.block_count 2.0, but must have a whole number"),
        ({"block_count": True}, "qwen2.block_count True, but must have a whole number"),
        ({"context_length": 0}, "qwen2.context_length 0, but must have a whole number"),
        ({"attention.head_count": 5}, "head_count 5, but must have a divisor of embedding_length"),
        ({"attention.head_count": [4, 2]}, r"head_count \[4, 2\], but must have a whole number"),
        ({"attention.head_count_kv": 3}, "head_count_kv 3, but must have a divisor"),
        ({"attention.head_count_kv": 4}, r"attn_k.weight' of the shape .* must have \[32, 32\]"),
        ({"attention.key_length": 16}, "key_length 16, but must have 8"),
        ({"attention.value_length": 4}, "value_length 4, but must have 8"),
        ({"attention.causal": False}, "causal False, but only True can be converted"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, "-1.0, but must have a number above 0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "nan, but must have a number above"),
        ({"attention.layer_norm_rms_epsilon": 0}, "epsilon 0, but must have a number above 0"),
        ({"rope.freq_base": float("inf")}, "freq_base inf, but must have a number above 0"),
        ({"rope.dimension_count": 4}, "dimension_count 4, but must have 8"),
        ({"rope.scaling.type": "yarn"}, "type 'yarn', but only 'none' can be converted"),
        ({"rope.scaling.factor": 4.0}, "factor 4.0, but only 0 can be converted"),
        ({"attention.sliding_window": 8}, "sliding_window 8, but only 0 can be converted"),
        ({"final_logit_softcapping": 30.0}, "softcapping 30.0, but only 0 can be converted"),
        ({"logit_scale": 0.5}, "logit_scale 0.5, but only 0 can be converted"),
        ({"expert_count": 8}, "expert_count 8, but only 0 can be converted"),
        ({"unheard_of": 1}, "qwen2.unheard_of 1, but it would be lost"),
        ({"vocab_size": 99}, "vocab_size 99, but must have 272"),
        ({"feed_forward_length": 63}, r"ffn_(gate|down|up).weight' of the shape"),
        ({"embedding_length": 64}, r"of the shape"),
    ],
)
def test_a_key_that_does_not_fit_or_would_be_lost_is_named(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = damaged_model(tmp_path, fields=fields)
    with pytest.raises(QSpecError, match=f"damaged.gguf has .*{message}") as caught:
        convert(file, tmp_path / "made")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention.sliding_window": 128},
        {"attention.head_count": [4, 4]},
        {"rope.scaling.type": "none", "rope.scaling.original_context_length": 64},
        {"expert_count": 0, "logit_scale": 0.0},
    ],
)
def test_a_key_that_changes_nothing_is_no_obstacle(fields: dict[str, Any], tmp_path: Path) -> None:
    plain = convert(damaged_model(tmp_path), tmp_path / "plain")
    made = convert(damaged_model(tmp_path, fields=fields), tmp_path / "made")
    assert (made / "config.json").read_text() == (plain / "config.json").read_text()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_q_norm.weight": torch.ones(8)}, "'blk.0.attn_q_norm.weight', which a Qwen2"),
        ({"blk.0.ffn_up.scale": torch.ones(1)}, "'blk.0.ffn_up.scale', which a Qwen2"),
        ({"odd": torch.ones(8)}, "the tensor 'odd', which a Qwen2ForCausalLM"),
        ({"output_norm.weight": torch.ones(31)}, r"of the shape \[31\], but model.norm.weight"),
        ({"blk.0.ffn_up.weight": torch.ones(32, 64)}, r"\[32, 64\], but .* have \[64, 32\]"),
        ({"token_embd.weight": torch.ones(100, 32)}, "272 tokens, but must have at most 100"),
        ({"output_norm.weight": torch.full((32,), torch.nan)}, "output_norm.weight' with weights"),
        ({"output_norm.weight": torch.full((32,), torch.inf)}, "that are not finite in torch.bf"),
    ],
)
def test_a_tensor_that_does_not_fit_or_would_be_lost_is_named(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(QSpecError, match=f"damaged.gguf has .*{message}"):
        convert(damaged_model(tmp_path, tensors=tensors), tmp_path / "made")


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"model": "t5"}, "ggml.model 't5', but must have 'gpt2' or 'llama'"),
        ({"tokens": [*BPE["tokens"][:-1], "a"]}, "'a' twice, but must have each token once"),
        ({"token_type": [1, 1]}, "token_type .*, but must have a list of 272 numbers"),
        ({"merges": ["1 2 3"]}, "merges '1 2 3', but must have two tokens"),
        ({"merges": ["1 nothere"]}, "so give the folder of the model's own tokenizer"),
        ({"eos_token_id": 2**31}, f"eos_token_id {2**31}, but must have an id from 0 to 271"),
        ({"add_eos_token": True}, "add_eos_token True, but must have False, or --tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_converted_is_refused(
    tokenizer: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(QSpecError, match=f"damaged.gguf.*{message}") as caught:
        convert(damaged_model(tmp_path, tokenizer=tokenizer), tmp_path / "made")
    assert "\n" not in str(caught.value)


def test_weights_that_overflow_the_asked_type_are_refused(tmp_path: Path) -> None:
    file = damaged_model(tmp_path, tensors={"output_norm.weight": torch.full((32,), 1e5)})
    with pytest.raises(QSpecError, match="not finite in torch.float16"):
        convert(file, tmp_path / "made", dtype="float16")
