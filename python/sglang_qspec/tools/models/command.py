"""The command `qspec models`: its tasks, their options and what they print."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from sglang_qspec import values
from sglang_qspec.tools.models import convert, demo_models, quantize, skip_layers
from sglang_qspec.tools.models.convert import DTYPES
from sglang_qspec.tools.models.prompts import CALIBRATION, texts_of
from sglang_qspec.tools.models.skip_layers import TOKENS
from sglang_qspec.values import option


def add_options(parser: argparse.ArgumentParser) -> Any:
    """Add the tasks, and return argparse's object to which other tasks can be added."""
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    tasks.add_parser(
        "demo",
        help="build the demo models and print their folders",
        description="Build the demo models in the cache, without a network, and print their "
        "folders: a line 'target PATH', then a line 'draft PATH'.",
    ).set_defaults(run=_demo)
    _add_quantize(tasks)
    _add_skip_layers(tasks)
    _add_convert(tasks)
    return tasks


def _add_quantize(tasks: Any) -> None:
    parser = tasks.add_parser(
        "quantize",
        help="write a quantized draft model of a local checkpoint",
        description="Quantize the weights of a checkpoint by rounding to nearest, write them in "
        "GPTQ layout, and print the output folder.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the checkpoint")
    add("--bits", type=option(values.positive), required=True, help="4 or 8")
    _add_layout(parser)
    add("--output", type=Path, help="folder to create (default: in the cache)")
    parser.set_defaults(run=_quantize)


def _add_skip_layers(tasks: Any) -> None:
    parser = tasks.add_parser(
        "skip-layers",
        help="write a draft model that is the target with layers left out",
        description="Leave decoder layers of a checkpoint out, one after another: each time the "
        "layer whose loss costs the least agreement with the whole model, along its own answers to "
        "the prompts. Write the rest as a checkpoint, and print its folder. `qspec models compare` "
        "says what it is worth as a draft model.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the checkpoint")
    add(
        "--keep",
        type=option(values.positive),
        required=True,
        metavar="N",
        help="number of layers to keep",
    )
    add(
        "--prompts",
        type=Path,
        metavar="JSONL",
        help="file with a `prompt` in each line, or in Spec-Bench's format (default: eight "
        "prompts, none of which is a default prompt of compare)",
    )
    add(
        "--tokens",
        type=option(values.positive),
        default=TOKENS,
        metavar="N",
        help="maximum length of an answer, in tokens (default: %(default)s)",
    )
    add(
        "--quantize",
        type=option(values.positive),
        metavar="BITS",
        help="also quantize the weights: to 4 or 8 bits",
    )
    _add_layout(parser)
    add("--output", type=Path, required=True, help="folder to create")
    parser.set_defaults(run=_skip_layers)


def _add_convert(tasks: Any) -> None:
    parser = tasks.add_parser(
        "convert",
        help="write a GGUF file as a Hugging Face checkpoint",
        description="Dequantize the weights of a GGUF file, write them with configuration, "
        "tokenizer and chat template as a Hugging Face checkpoint, and print its folder. "
        "Architectures are those that transformers reads from GGUF files, such as Llama, Qwen2, "
        "Qwen3 and Gemma.",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE.gguf", help="file to convert")
    add("--output", type=Path, required=True, help="folder to create")
    add(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="data type of the weights (default: %(default)s)",
    )
    add(
        "--tokenizer",
        type=Path,
        help="folder with the model's own tokenizer, to take instead of the one in the file",
    )
    parser.set_defaults(run=_convert)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options of quantized weights besides their bits."""
    parser.add_argument(
        "--group-size",
        type=option(_group_size),
        metavar="N|channel",
        help="number of weights that share a scale: 128, 64, 32, or channel for all weights of an "
        "output channel (default: channel for 8 bits, the largest number that fits for 4)",
    )
    parser.add_argument(
        "--for",
        dest="device",
        choices=("cpu", "cuda"),
        help="kind of device that runs the draft model; its kernels must take the shapes of the "
        "layers (default: cuda if there is a GPU, otherwise cpu)",
    )


def _demo(options: argparse.Namespace) -> str:  # noqa: ARG001
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
    return str(
        convert(options.file, options.output, dtype=options.dtype, tokenizer=options.tokenizer)
    )


def _device(options: argparse.Namespace) -> Literal["cpu", "cuda"]:
    """The kind of device that runs the draft model."""
    return options.device or ("cuda" if _has_cuda() else "cpu")


def _has_cuda() -> bool:
    """Whether torch finds a GPU on this machine."""
    import torch

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
