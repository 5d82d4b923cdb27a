"""The configuration of a head: which target it fits, and its sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.files import weight_files


class HeadKind(Enum):
    """The kinds of heads, by the names of the classes that load them."""

    EAGLE3 = "LlamaForCausalLMEagle3"
    """Reads the outputs of several layers of its target."""
    EAGLE2 = "LlamaForCausalLMEagle"
    """Reads what the target's LM head reads, and drafts with that LM head."""
    MEDUSA = "MedusaModel"
    """Reads what the target's LM head reads, and has a head for each of the next tokens. vLLM has a
    class of this name; SGLang runs none."""
    HYDRA = "HydraHead"
    """Reads what the target's LM head reads and the newest token, without attention, and has an LM
    head for its most frequent ids. The format is this project's own."""


STATES = 3
"""Number of the target's hidden states that a head reads by default."""
MOST_STATES = 16
Size = Annotated[int, msgspec.Meta(ge=1)]
MOST_HEADS = 16
"""Maximum number of Medusa heads."""
FEW = 8
"""Number of layers below which a target has its own default layers."""


class _Eagle(msgspec.Struct, frozen=True):
    """What SGLang reads from `eagle_config`."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    use_aux_hidden_state: bool = True


class _Content(msgspec.Struct, frozen=True):
    """The fields of a head's `config.json` that are checked here."""

    architectures: list[str]
    hidden_size: int
    vocab_size: int
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    num_hidden_layers: int = 1
    num_aux_hidden_states: int | None = None
    eagle_config: _Eagle | None = None
    tie_word_embeddings: bool = False
    bias: bool = False
    attention_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    use_aux_norm: bool = False
    norm_output: bool = False
    hot_vocab_size: int | None = None


class _Medusa(msgspec.Struct, frozen=True):
    """The fields of the `config.json` of Medusa heads, with names of vLLM and of the authors."""

    medusa_num_heads: int | None = None
    num_heads: int | None = None
    medusa_num_layers: int | None = None
    num_hidden_layers: int = 1
    hidden_size: int | None = None
    vocab_size: int | None = None
    truncated_vocab_size: int | None = None


class _Hydra(msgspec.Struct, frozen=True):
    """The fields of the `config.json` of a Hydra head."""

    hidden_size: Size
    vocab_size: Size
    draft_vocab_size: Size
    intermediate_size: Size


@dataclass(frozen=True)
class HeadConfig:
    """A head of any kind. Widths are numbers of features."""

    kind: HeadKind
    hidden_size: int
    """Width of the head, which is that of the target's embeddings."""
    target_hidden_size: int
    """Width of the target's hidden states."""
    vocab_size: int
    """Number of token ids of the target."""
    draft_vocab_size: int
    """Number of token ids that the head can draft."""
    layers: tuple[int, ...] | None
    """The layers whose outputs an EAGLE-3 head reads; None for `default_layers`."""
    states: int
    """Number of the target's states that the head reads at a token."""
    fields: Mapping[str, Any]
    """The content of `config.json`; for EAGLE heads with the fields of transformers' `LlamaConfig`
    for the decoder layer."""
    heads: int = 0
    """Number of Medusa heads, each of which drafts one token."""
    head_layers: int = 0
    """Number of layers of each of them before its LM head."""
    inner_size: int = 0
    """Width between the two layers of a Hydra head."""

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The layers that an EAGLE-3 head reads of a target with this number of layers.

        Raises ConfigError.
        """
        layers = default_layers(target_layers) if self.layers is None else self.layers
        if max(layers) >= target_layers - 1:
            raise ConfigError(
                f"the head reads layer {max(layers)} of its target, but must read layers below "
                f"the last one, {target_layers - 1}"
            )
        return layers

    def check_target(self, config: Mapping[str, Any], model: str = "target") -> None:
        """Raise ConfigError unless a model with this `config.json` has the head's widths.

        `model` says in the message what it is.
        """
        found = {
            "hidden_size": (self.target_hidden_size, config.get("hidden_size")),
            "vocab_size": (self.vocab_size, config.get("vocab_size")),
        }
        for name, (own, target) in found.items():
            if own != target:
                raise ConfigError(
                    f"the head is for a {model} with {name} {own}, but the {model} has {target}"
                )
        if self.kind is HeadKind.EAGLE3:
            self.layers_of(int(config["num_hidden_layers"]))


def default_layers(target_layers: int) -> tuple[int, ...]:
    """The layers that heads read by default: an early, a middle and a late one.

    The numbers are those of SGLang's `set_eagle3_layers_to_capture`, and of vLLM. Targets with few
    layers have others, because these would not be three different ones.
    """
    if target_layers < FEW:
        return tuple(sorted({0, max(0, target_layers // 2 - 1), max(0, target_layers - 2)}))
    return 1, target_layers // 2 - 1, target_layers - 4


def is_head(content: Mapping[str, Any]) -> bool:
    """Whether the content of a `config.json` is that of a head which this part can run."""
    return _kind_of(content) is not None


def _kind_of(content: Mapping[str, Any]) -> HeadKind | None:
    """The kind of the head with this `config.json`; that of Medusa's authors names no class."""
    architectures = content.get("architectures") or ()
    if "medusa_num_heads" in content:
        return HeadKind.MEDUSA
    return next((kind for kind in HeadKind if kind.value in architectures), None)


def is_head_folder(folder: Path) -> bool:
    """Whether a folder has the checkpoint of such a head."""
    try:
        content = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return False
    return isinstance(content, dict) and is_head(content)


def digest(folder: Path | None) -> str:
    """Digest of a head's configuration and weights; empty for no head. Raises ConfigError."""
    if folder is None:
        return ""
    found = hashlib.sha256()
    for path in [folder / "config.json", *weight_files(folder)]:
        try:
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{path}: {error}") from None
    return found.hexdigest()


def folder_of(draft_model: str | None, head_path: str) -> Path | None:
    """The folder of the head among a server's draft model and `head_path`; None for no head."""
    if head_path:
        return Path(head_path).expanduser()
    folder = None if draft_model is None else Path(draft_model).expanduser()
    return folder if folder is not None and is_head_folder(folder) else None


def read(folder: Path) -> HeadConfig:
    """Read the configuration of a head. Raises ConfigError with what is not supported."""
    path = folder / "config.json"
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        kind = _kind_of(fields)
        if kind is HeadKind.MEDUSA:
            return _medusa(folder, msgspec.convert(fields, _Medusa), fields)
        if kind is HeadKind.HYDRA:
            return _hydra(path, msgspec.convert(fields, _Hydra), fields)
        content = msgspec.convert(fields, _Content)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if kind is None:
        named, names = ", ".join(content.architectures), ", ".join(each.value for each in HeadKind)
        raise ConfigError(f"{path}: architectures is {named}, but must be one of {names}")
    _check_fields(
        path,
        ("num_hidden_layers", content.num_hidden_layers, 1),
        ("attention_bias", content.attention_bias, False),
    )
    if kind is HeadKind.EAGLE2:
        return _eagle2(path, content, fields)
    _check_fields(
        path,
        ("tie_word_embeddings", content.tie_word_embeddings, False),
        ("bias", content.bias, False),
        ("norm_before_fc", content.norm_before_fc, False),
        ("fc_norm", content.fc_norm or content.use_aux_norm, False),
        ("norm_output", content.norm_output, False),
    )
    eagle = content.eagle_config or _Eagle()
    if not eagle.use_aux_hidden_state:
        raise ConfigError(f"{path}: use_aux_hidden_state is false, but only true is supported")
    layers = eagle.eagle_aux_hidden_state_layer_ids
    states = content.num_aux_hidden_states or (len(layers) if layers else STATES)
    _check_layers(path, layers, states)
    return HeadConfig(
        kind=kind,
        hidden_size=content.hidden_size,
        target_hidden_size=content.target_hidden_size or content.hidden_size,
        vocab_size=content.vocab_size,
        draft_vocab_size=content.draft_vocab_size or content.vocab_size,
        layers=None if layers is None else tuple(layers),
        states=states,
        fields=fields,
    )


def _eagle2(path: Path, content: _Content, fields: Mapping[str, Any]) -> HeadConfig:
    """The configuration of an EAGLE-2 head."""
    width, ids = content.hidden_size, content.vocab_size
    _check_fields(
        path,
        ("target_hidden_size", content.target_hidden_size or width, width),
        ("draft_vocab_size", content.draft_vocab_size or ids, ids),
        ("hot_vocab_size", content.hot_vocab_size or ids, ids),
    )
    return HeadConfig(HeadKind.EAGLE2, width, width, ids, ids, None, 1, fields)


def _medusa(folder: Path, content: _Medusa, fields: Mapping[str, Any]) -> HeadConfig:
    """The configuration of Medusa heads. Raises ConfigError."""
    path = folder / "config.json"
    heads = content.medusa_num_heads or content.num_heads or 0
    if not 1 <= heads <= MOST_HEADS:
        raise ConfigError(
            f"{path}: medusa_num_heads is {heads}, but must be from 1 to {MOST_HEADS}"
        )
    layers = content.medusa_num_layers or content.num_hidden_layers
    width, ids = content.hidden_size, content.vocab_size
    if width is None or ids is None:
        width, ids = _medusa_sizes(folder)
    _check_fields(path, ("truncated_vocab_size", content.truncated_vocab_size or ids, ids))
    return HeadConfig(HeadKind.MEDUSA, width, width, ids, ids, None, 1, fields, heads, layers)


def _medusa_sizes(folder: Path) -> tuple[int, int]:
    """Width and number of token ids of Medusa heads, by the shapes of their weights.

    Raises ConfigError if there are none.
    """
    from sglang_qspec.heads.weights import weight_shapes  # torch takes a second

    shapes = weight_shapes(folder)
    products = [shape for shape in shapes if len(shape) == 2]  # the others are biases
    if not products:
        raise ConfigError(
            f"{folder / 'config.json'} has no hidden_size and no vocab_size, and the folder no "
            "weights that tell them"
        )
    return products[0][1], max(rows for rows, _ in products)


def _hydra(path: Path, content: _Hydra, fields: Mapping[str, Any]) -> HeadConfig:
    """The configuration of a Hydra head."""
    width, ids, inner = content.hidden_size, content.vocab_size, content.intermediate_size
    if content.draft_vocab_size > ids:
        raise ConfigError(
            f"{path}: draft_vocab_size is {content.draft_vocab_size}, but must be at most "
            f"vocab_size, {ids}"
        )
    own = content.draft_vocab_size
    return HeadConfig(HeadKind.HYDRA, width, width, ids, own, None, 1, fields, inner_size=inner)


def _check_fields(path: Path, *found: tuple[str, int, int]) -> None:
    """Raise ConfigError unless each (name, value, only supported value) is supported."""
    for name, value, allowed in found:
        if value != allowed:
            raise ConfigError(f"{path}: {name} is {value}, but only {allowed} is supported")


def _check_layers(path: Path, layers: Sequence[int] | None, states: int) -> None:
    if not 1 <= states <= MOST_STATES:
        raise ConfigError(
            f"{path}: num_aux_hidden_states is {states}, but must be from 1 to {MOST_STATES}"
        )
    if layers is None:
        if states != STATES:
            raise ConfigError(
                f"{path}: num_aux_hidden_states is {states}, so "
                "eagle_aux_hidden_state_layer_ids must name the layers"
            )
    elif len(layers) != states or not rises(layers):
        raise ConfigError(
            f"{path}: eagle_aux_hidden_state_layer_ids is {list(layers)}, but must be {states} "
            "different layers from 0 on, in rising order"
        )


def rises(layers: Sequence[int]) -> bool:
    """Whether the numbers are those of different layers in the order in which they run."""
    return min(layers) >= 0 and list(layers) == sorted(set(layers))
