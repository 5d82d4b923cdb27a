"""The command `qspec models`: its tasks, their options and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from sglang_qspec import values
from sglang_qspec.tools import declare
from sglang_qspec.tools.compare import command as compare
from sglang_qspec.tools.models import convert, demo_models, quantize, skip_layers
from sglang_qspec.tools.models.convert import DTYPES
from sglang_qspec.tools.models.prompts import CALIBRATION, texts_of
from sglang_qspec.tools.models.skip_layers import TOKENS
from sglang_qspec.tools.train_head import command as train_head

DESCRIPTION = """Write target and draft checkpoints, and measure what draft models would be worth.
docs/draft-models.md describes the tasks."""


class Task(NamedTuple):
    """A task of the command. `add_options` sets the default `run`."""

    add_options: Callable[[argparse.ArgumentParser], None]
    help: str
    description: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the tasks."""
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, task in TASKS.items():
        task.add_options(tasks.add_parser(name, help=task.help, description=task.description))


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_demo)


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    add = partial(declare.value, parser)
    add("--model", "folder of the checkpoint", Path, required=True)
    add("--bits", "4 or 8", values.positive, required=True)
    _add_layout(parser)
    add("--output", "folder to create (default: in the cache)", Path)
    parser.set_defaults(run=_quantize)


def _add_skip_layers(parser: argparse.ArgumentParser) -> None:
    add = partial(declare.value, parser)
    add("--model", "folder of the checkpoint", Path, required=True)
    add("--keep", "number of layers to keep", values.positive, "N", required=True)
    add(
        "--prompts",
        "file with a `prompt` in each line, or in Spec-Bench's format (default: eight prompts, "
        "none of which is a default prompt of compare)",
        Path,
        "JSONL",
    )
    add("--tokens", "maximum length of an answer, in tokens", values.positive, "N", default=TOKENS)
    add("--quantize", "also quantize the weights: to 4 or 8 bits", values.positive, "BITS")
    _add_layout(parser)
    add("--output", "folder to create", Path, required=True)
    parser.set_defaults(run=_skip_layers)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    add = partial(declare.value, parser)
    add("file", "file to convert", Path, "FILE.gguf")
    add("--output", "folder to create", Path, required=True)
    add("--dtype", "data type of the weights", choices=DTYPES, default=DTYPES[0])
    add(
        "--tokenizer",
        "folder with the model's own tokenizer, to take instead of the one in the file",
        Path,
    )
    parser.set_defaults(run=_convert)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options of quantized weights besides their bits."""
    add = partial(declare.value, parser)
    add(
        "--group-size",
        "number of weights that share a scale: 128, 64, 32, or channel for all weights of an "
        "output channel (default: channel for 8 bits, the largest number that fits for 4)",
        _group_size,
        "N|channel",
    )
    add(
        "--for",
        "kind of device that runs the draft model; its kernels must take the shapes of the layers "
        "(default: cuda if there is a GPU, otherwise cpu)",
        dest="device",
        choices=("cpu", "cuda"),
    )


TASKS = {
    "demo": Task(
        _add_demo,
        "build the demo models and print their folders",
        "Build the demo models in the cache, without a network, and print their folders: a line "
        "'target PATH', then a line 'draft PATH'.",
    ),
    "quantize": Task(
        _add_quantize,
        "write a quantized draft model of a local checkpoint",
        "Quantize the weights of a checkpoint by rounding to nearest, write them in GPTQ layout, "
        "and print the output folder.",
    ),
    "skip-layers": Task(
        _add_skip_layers,
        "write a draft model that is the target with layers left out",
        "Leave decoder layers of a checkpoint out, one after another: each time the layer whose "
        "loss costs the least agreement with the whole model, along its own answers to the "
        "prompts. Write the rest as a checkpoint, and print its folder. `qspec models compare` "
        "says what it is worth as a draft model.",
    ),
    "convert": Task(
        _add_convert,
        "write a GGUF file as a Hugging Face checkpoint",
        "Dequantize the weights of a GGUF file, write them with configuration, tokenizer and chat "
        "template as a Hugging Face checkpoint, and print its folder. Architectures are those that "
        "transformers reads from GGUF files, such as Llama, Qwen2, Qwen3 and Gemma.",
    ),
    "train-head": Task(
        train_head.add_options,
        "train an EAGLE head, or Medusa heads, for a target",
        train_head.DESCRIPTION,
    ),
    "compare": Task(
        compare.add_options,
        "measure what draft models would be worth for a target",
        compare.DESCRIPTION,
    ),
}


def _demo(_options: argparse.Namespace) -> str:
    models = demo_models(on_cuda=_has_cuda())
    return f"target {models.target}\ndraft {models.draft}"


def _quantize(options: argparse.Namespace) -> str:
    given = (options.model, options.bits, options.group_size, options.output)
    return str(quantize(*given, device=_device(options)))


def _skip_layers(options: argparse.Namespace) -> str:
    folder = skip_layers(
        options.model,
        options.keep,
        options.output,
        prompts=texts_of(options.prompts, CALIBRATION),
        tokens=options.tokens,
        bits=options.quantize,
        group_size=options.group_size,
        device=_device(options),
    )
    return str(folder)


def _convert(options: argparse.Namespace) -> str:
    given = {"dtype": options.dtype, "tokenizer": options.tokenizer}
    return str(convert(options.file, options.output, **given))


def _device(options: argparse.Namespace) -> Literal["cpu", "cuda"]:
    """The kind of device that runs the draft model."""
    return options.device or ("cuda" if _has_cuda() else "cpu")


def _has_cuda() -> bool:
    """Whether torch finds a GPU on this machine."""
    import torch  # takes seconds

    return torch.cuda.is_available()


def _group_size(text: str) -> int | str:
    """Parse a group size; ValueError with what is allowed. `quantize` checks it for the model."""
    if text == "channel":
        return text
    try:
        size: int = values.positive(text)
        return size
    except ValueError:
        raise ValueError("128, 64, 32 or channel") from None
