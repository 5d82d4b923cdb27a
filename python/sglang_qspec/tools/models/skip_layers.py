"""Self-drafts: a draft model that is its target with decoder layers left out.

The layers are chosen by measured agreement, as in Draft & Verify (Zhang et al. 2023, arXiv
2309.08168). That paper leaves out attention and MLP blocks one by one, and searches by Bayesian
optimization. A checkpoint has whole layers, so this module leaves out whole layers, one after
another: each time the layer whose loss costs the least agreement.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.tools.models.cache import build_folder
from sglang_qspec.tools.models.files import (
    check_new,
    copy_others,
    read_config,
    write_index,
    write_json,
)
from sglang_qspec.tools.models.intact import check_intact
from sglang_qspec.tools.models.prompts import CALIBRATION, chat_ids
from sglang_qspec.tools.models.quantize import GroupSize, group_for, quantize

if TYPE_CHECKING:
    from sglang_qspec.tools.models.decoder import Decoder, Fit

logger = logging.getLogger(__name__)

TOKENS = 32
"""Default of the maximum number of tokens of an answer."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def skip_layers(
    model: Path,
    keep: int,
    output: Path,
    *,
    prompts: Sequence[str] = CALIBRATION,
    tokens: int = TOKENS,
    bits: int | None = None,
    group_size: GroupSize | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> Path:
    """Write `model` with only `keep` of its decoder layers to the new folder `output`.

    The model's own greedy answers of at most `tokens` tokens to the `prompts` serve as texts. The
    weights are the model's own, or quantized to `bits` in groups of `group_size` for a kind of
    `device` (`models.quantize`).

    Raises ConfigError if an argument is not allowed for the model, or if the checkpoint is not
    intact. Raises QSpecError if its layers cannot be left out, or `output` exists and is not empty.
    """
    from sglang_qspec.tools.models.decoder import Decoder  # torch takes seconds

    check_new(output)
    layers = read_config(model).get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ConfigError(f"{model} has no num_hidden_layers in its config.json")
    if not 1 <= keep < layers:
        raise ConfigError(
            f"keep is {keep}, but must be from 1 to {layers - 1}: {model} has {layers} layers"
        )
    if bits is not None:
        group_for(model, bits, group_size, device)
    check_intact(model)
    decoder = Decoder(model)
    _read_answers(decoder, model, prompts, tokens)
    kept, fit = choose(decoder, keep)
    logger.info(
        "kept %d of %d layers (%s); the arg max agrees at %.1f %% of the tokens, the overlap of "
        "the distributions is %.3f",
        keep,
        layers,
        ", ".join(map(str, kept)),
        100 * fit.agreement,
        fit.overlap,
    )
    logits = decoder.logits(kept)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        written = Path(folder) / "layers"
        written.mkdir()
        write(model, kept, written)
        if not decoder.is_written(written, logits):
            raise QSpecError(
                f"{model} cannot do without layers: its configuration does not say which ones are "
                "left out"
            )
        if bits is not None:
            return quantize(written, bits, group_size, output, device=device)

        def build(content: Path) -> None:
            for path in written.iterdir():
                path.rename(content / path.name)

        return build_folder(output, build)


def choose(decoder: Decoder, keep: int) -> tuple[list[int], Fit]:
    """The numbers of the `keep` layers that reproduce all layers of `decoder` best, and how well.

    In each round every remaining layer is left out once, the first and the last one included. The
    layer without which the overlap is largest is removed.
    """
    from tqdm import tqdm

    kept = list(range(len(decoder)))
    fit = decoder.fit(decoder.logits(kept))
    rounds = range(len(kept), keep, -1)
    with tqdm(total=sum(rounds), desc=f"choosing {keep} of {len(kept)} layers") as progress:
        for _ in rounds:
            states = decoder.states(kept)
            tried = []
            for place in range(len(kept)):
                tried.append(decoder.fit(decoder.logits(kept[place + 1 :], states[place])))
                progress.update()
            place = max(range(len(kept)), key=lambda each: tried[each])
            fit = tried[place]
            removed = kept.pop(place)
            progress.set_postfix_str(f"without {removed}: agrees {100 * fit.agreement:.1f} %")
            logger.debug("without layer %d: %s", removed, fit)
    return kept, fit


def write(model: Path, kept: Sequence[int], folder: Path) -> None:
    """Write the intact checkpoint `model` with only the layers `kept` into the empty `folder`."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    shards = sorted(model.glob("*.safetensors"))
    number = {str(old): new for new, old in enumerate(kept)}
    places: dict[str, str] = {}
    size = 0
    for shard in shards:
        tensors = {}
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                match = _LAYER.match(name)
                if match and match[1] not in number:
                    continue
                new = f"model.layers.{number[match[1]]}.{name[match.end() :]}" if match else name
                tensors[new] = file.get_tensor(name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(tensors, shard.name)
        save_file(tensors, folder / shard.name, metadata={"format": "pt"})
    if len(shards) > 1:
        write_index(folder, places, size)
    copy_others(model, folder)
    write_json(folder / "config.json", _cut(read_config(model), kept))


def _cut(config: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The configuration of a model with only the layers `kept`.

    A list with an entry for each layer, such as `layer_types`, loses the entries of the others.
    """
    layers = config["num_hidden_layers"]
    cut = {
        name: [value[layer] for layer in kept]
        if isinstance(value, list) and len(value) == layers
        else value
        for name, value in config.items()
    }
    return {**cut, "num_hidden_layers": len(kept)}


def _read_answers(decoder: Decoder, model: Path, prompts: Sequence[str], tokens: int) -> None:
    from tqdm import tqdm
    from transformers import AutoTokenizer

    ids = chat_ids(AutoTokenizer.from_pretrained(model), prompts)
    answers = [decoder.answer(prompt, tokens) for prompt in tqdm(ids, desc="writing answers")]
    decoder.read(ids, answers)
