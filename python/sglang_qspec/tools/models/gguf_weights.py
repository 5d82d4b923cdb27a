"""Writes the weights of a GGUF file under the names of transformers, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.models.gguf_families import FREQUENCIES, Change, family_of
from sglang_qspec.tools.models.gguf_file import GGUFFile, Tensor
from sglang_qspec.tools.models.safetensors_file import write_checkpoint

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """A tensor of the file, and the weights of the checkpoint that it has one after another."""

    tensor: Tensor
    change: Change | None
    weights: Sequence[tuple[str, Shape]]


def write_weights(file: GGUFFile, model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write the weights of `file` in `dtype` to `folder`.

    `model` is the model of transformers that they are for, on the meta device. Raises QSpecError
    if file and model do not have the same weights of the same shapes, or if a weight is not finite.
    """
    moves = _moves(file, model)
    shapes = [weight for move in moves for weight in move.weights]
    config = model.config.to_dict()
    pieces = (piece for move in moves for piece in _pieces(move, config, dtype))
    write_checkpoint(folder, shapes, dtype, pieces)


def _moves(file: GGUFFile, model: Any) -> list[Move]:
    family = family_of(file)
    expected = _expected(file, model)
    for name in file.tensors:
        if name not in expected and name != FREQUENCIES:
            raise QSpecError(
                f"{file.path} has the tensor {name!r}, which a {type(model).__name__} of its "
                "configuration does not have, so it would be lost"
            )
    moves = []
    for name, weights in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise QSpecError(
                f"{file.path} has no tensor {name!r} and so no weights for {weights[0][0]}, so the "
                "model would be incomplete"
            )
        change = family.change(name)
        _check_shape(file, tensor, weights, is_turned=change is not None)
        moves.append(Move(tensor, change, weights))
    return moves


def _expected(file: GGUFFile, model: Any) -> dict[str, list[tuple[str, Shape]]]:
    """The weights of `model` by the tensors of the file that have them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = file.metadata["general.architecture"]
    number = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, model.config.num_hidden_layers)
    found: dict[str, list[tuple[str, Shape]]] = {}
    for name, weight in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            for source, weights in _sources(names, name, tuple(weight.shape)):
                found[source] = weights
    return found


def _sources(names: Any, name: str, shape: Shape) -> Iterator[tuple[str, list[tuple[str, Shape]]]]:
    """The tensors of a file that a weight comes from, with the weights of the checkpoint.

    transformers joins the weights of all experts, and files join those of each kind. A checkpoint
    has the weights of each expert.
    """
    layer, _, kind = name.rpartition(".experts.")
    if not layer:
        base, _, suffix = name.rpartition(".")
        yield f"{names.get_name(base)}.{suffix}", [(name, shape)]
        return
    block = names.get_name(f"{layer}.gate").removesuffix("_gate_inp")
    kinds = ("gate", "up") if kind == "gate_up_proj" else ("down",)
    experts, rows, columns = shape
    for each in kinds:
        yield (
            f"{block}_{each}_exps.weight",
            [
                (f"{layer}.experts.{expert}.{each}_proj.weight", (rows // len(kinds), columns))
                for expert in range(experts)
            ],
        )


def _check_shape(
    file: GGUFFile, tensor: Tensor, weights: Sequence[tuple[str, Shape]], *, is_turned: bool
) -> None:
    name, shape = weights[0]
    joined = shape if len(weights) == 1 else (len(weights), *shape)
    flat = tuple(size for size in joined if size > 1)
    found = tuple(size for size in tensor.shape if size > 1)
    if found != flat and not (is_turned and found == flat[::-1]):
        raise QSpecError(
            f"{file.path} has {tensor.name!r} of the shape {list(tensor.shape)}, but {name} must "
            f"have {list(joined)}"
        )


def _pieces(move: Move, config: Mapping[str, Any], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The weights of a move in order, in `dtype`."""
    import torch

    tensor = move.tensor
    chunks = (
        tensor.chunks() if move.change is None else iter([move.change(tensor.values(), config)])
    )
    for chunk in chunks:
        piece = torch.from_numpy(chunk).to(dtype)
        if not bool(torch.isfinite(piece).all()):
            raise QSpecError(
                f"{tensor.file} has {tensor.name!r} with weights that are not finite in {dtype}"
            )
        yield piece
