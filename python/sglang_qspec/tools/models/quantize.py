"""Quantized draft models of a local checkpoint, written by auto-round in GPTQ layout.

On CUDA such a model needs layers of certain shapes (`models.kernels`). `rounded` writes a model
with the same rounded weights in bfloat16, which runs on every device.

auto-round rounds the weights of the linear layers to nearest, on symmetric integer grids. It needs
no calibration data, no network and no GPU. Embeddings, norms and the LM head stay the same, bit for
bit. So do the tokenizer's files, because a draft model needs the tokenizer of its target.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.sidecar import marlin as kernels
from sglang_qspec.tools.models.cache import Recipe, build_folder, cached, sha256
from sglang_qspec.tools.models.files import (
    TOKENIZER_FILES,
    check_new,
    copy_files,
    copy_others,
    read_config,
    write_json,
)
from sglang_qspec.tools.models.intact import check_intact

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BITS = (4, 8)
GROUP_SIZES = (128, 64, 32)
METHOD = 1
"""Version of the method; increase it to rebuild cached checkpoints."""

GroupSize = int | Literal["channel"]
"""Number of neighbouring weights of an output channel that share a scale; `channel` means all."""

_SHARED_FILES = (*TOKENIZER_FILES, "generation_config.json")
"""Files that auto-round rewrites but a draft model must share with its target."""


def quantize(
    model: Path,
    bits: int,
    group_size: GroupSize | None = None,
    output: Path | None = None,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Path:
    """Return a folder with `model` quantized to `bits`, built if it does not exist.

    The default group size is `channel` for 8 bits. For 4 bits it is the largest of 128, 64 and 32
    that divides the model's widths. The folder is `output`, or by default one in the cache.
    `device` is the kind of device that runs the quantized model.

    Raises ConfigError if `bits`, `group_size` or the model folder is not allowed, or if a kernel of
    `device` does not take the shape of a layer, or if a weight is missing, damaged or of another
    shape. Raises QSpecError if auto-round is not installed or
    `output` exists and is not empty.
    """
    group = group_for(model, bits, group_size, device)

    def build(folder: Path) -> None:
        _round_to_nearest(model, bits, group, folder)

    if output is not None:
        check_new(output)
        return build_folder(output, build)
    recipe: Recipe = {
        "model": _fingerprint(model),
        "bits": bits,
        "group": str(group),
        "method": METHOD,
    }
    return cached(f"{model.absolute().name}-w{bits}-{group}", recipe, build)


def group_for(
    model: Path, bits: int, group_size: GroupSize | None, device: Literal["cpu", "cuda"]
) -> GroupSize:
    """The group size with which `quantize` would write `model`. Raises ConfigError as it does."""
    if bits not in BITS:
        raise ConfigError(f"bits is {bits}, but must be 4 or 8")
    config = read_config(model)
    if "quantization_config" in config:
        raise ConfigError(f"{model} is quantized already; give the unquantized checkpoint")
    group = _group(config, bits, group_size)
    if device == "cuda":
        kernels.check_writable(model, config, -1 if group == "channel" else group)
    return group


def rounded(quantized: Path, source: Path) -> Path:
    """Return a folder in the cache with `quantized`, a model in GPTQ layout, in bfloat16.

    `source` is the model that `quantized` was made from. Each weight is the bfloat16 number nearest
    to the weight of `quantized`. The model is as large and as fast as `source`, and drafts like
    `quantized`.
    """

    def build(folder: Path) -> None:
        _dequantize(quantized, source, folder)

    recipe: Recipe = {"quantized": _fingerprint(quantized), "method": METHOD}
    return cached(f"{quantized.name}-in-bf16", recipe, build)


def _dequantize(quantized: Path, source: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy_others(source, folder)
    bits = read_config(quantized)["quantization_config"]["bits"]
    weights = {}
    for path in sorted(quantized.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            if kind == "qweight":
                weights[f"{layer}.weight"] = unpacked(tensor, tensors[f"{layer}.scales"], bits)
            elif kind not in ("scales", "qzeros", "g_idx"):
                weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def unpacked(packed: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The weights of a symmetric GPTQ layer in input order: bfloat16 [out, in].

    `packed` is int32 [in * bits / 32, out], with the first inputs in the lowest bits. `scales` is
    [groups, out].
    """
    import torch

    places = torch.arange(0, 32, bits, dtype=torch.int32)
    unsigned = (packed[:, None, :] >> places[None, :, None]) & (2**bits - 1)
    signed = unsigned.reshape(-1, packed.shape[1]) - 2 ** (bits - 1)
    steps = scales.float().repeat_interleave(len(signed) // len(scales), 0)
    return (signed * steps).T.contiguous().bfloat16()


def _group(config: dict[str, Any], bits: int, asked: GroupSize | None) -> GroupSize:
    widths = [config[name] for name in ("hidden_size", "intermediate_size") if name in config]
    allowed = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    if asked is None:
        return allowed[0] if bits == 4 and allowed else "channel"
    if asked != "channel" and asked not in allowed:
        choices = ", ".join([*map(str, allowed), "channel"])
        raise ConfigError(
            f"group size is {asked}, but must be one of {choices}: "
            f"it must divide the model's widths {widths}"
        )
    return asked


def _fingerprint(model: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(model.iterdir()):
        if path.suffix in (".json", ".safetensors", ".model", ".jinja", ".txt"):
            digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()


def _round_to_nearest(model: Path, bits: int, group: GroupSize, folder: Path) -> None:
    check_intact(model)
    logger.info("quantizing %s to %d bits, group %s", model.name, bits, group)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            from auto_round import AutoRound
    except ModuleNotFoundError as error:
        raise QSpecError(
            f"quantizing needs {error.name}, which is not installed: "
            "run `pip install 'sglang-qspec[quantize]'`"
        ) from error
    logging.getLogger("autoround").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # auto-round collects garbage after each layer; older objects would slow it down
    try:
        with contextlib.redirect_stdout(sys.stderr):
            AutoRound(
                str(model),
                bits=bits,
                group_size=-1 if group == "channel" else group,
                sym=True,
                iters=0,
                disable_opt_rtn=True,
                disable_model_free=True,  # model-free mode writes another layout than GPTQ
                device_map="cpu",
            ).quantize_and_save(str(folder / "written"), format="auto_gptq")
    finally:
        gc.unfreeze()
    _tidy(model, folder)


def _tidy(model: Path, folder: Path) -> None:
    """Move auto-round's files to the top of `folder`, and restore the source's parts in them."""
    written = next((folder / "written").rglob("config.json")).parent
    for path in list(written.iterdir()):
        path.rename(folder / path.name)
    shutil.rmtree(folder / "written")
    copy_files(model, folder, _SHARED_FILES)
    source = read_config(model)
    config = read_config(folder)
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
        if name in source:
            config[name] = source[name]
    write_json(folder / "config.json", config)
    _restore_weights(model, folder)


def _restore_weights(model: Path, folder: Path) -> None:
    """Undo auto-round's cast to float16 of the weights that it did not quantize."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    shards = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shards.update(dict.fromkeys(file.keys(), path))
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name in tensors.keys() & shards.keys():
            with safe_open(shards[name], framework="pt") as file:
                tensors[name] = file.get_tensor(name)
        save_file(tensors, path, metadata={"format": "pt"})
