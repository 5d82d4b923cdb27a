"""The `qspec` command.

qspec models demo                          build the demo models and print their folders
qspec models quantize --model M --bits 8   write a quantized draft model of a local checkpoint
qspec sidecar ...                          run a sidecar, which servers connect to
qspec keys PATH                            write a key file for a tcp link
qspec complete "prompt"                    print a completion and the draft source of its text
qspec top                                  show what a running server does
qspec show                                 serve a page that shows where each token comes from
qspec doctor                               check this machine and a pair of models
qspec theory --alpha A --k K ...           predict the throughput of each pipeline
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sglang_qspec import __version__
from sglang_qspec.complete import command as complete
from sglang_qspec.doctor import command as doctor
from sglang_qspec.errors import QSpecError
from sglang_qspec.show import command as show
from sglang_qspec.theory import command as theory
from sglang_qspec.top import command as top
from sglang_qspec.values import option


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns 0, or 1 after a QSpecError; wrong usage exits with 2.

    `qspec doctor` also returns 1 if a server cannot start.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["sidecar"]:  # has its own parser
        from sglang_qspec.sidecar.__main__ import main as sidecar

        return sidecar(arguments[1:]) or 0
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        if options.command == "keys":
            _keys(options.path)
        elif options.command == "complete":
            for piece in complete.run(options, colours=sys.stdout.isatty()):
                print(piece, end="", flush=True)
        elif options.command == "top":
            top.run(options)
        elif options.command == "show":
            show.run(options, lambda line: print(line, flush=True))
        elif options.command == "doctor":
            return doctor.run(options)
        elif options.command == "theory":
            print(theory.run(options))
        elif options.task == "demo":
            _demo()
        else:
            _quantize(options)
    except QSpecError as error:
        print(f"qspec: {error}", file=sys.stderr)
        return 1
    return 0


def _keys(path: Path) -> None:
    from sglang_qspec.link import keys

    keys.create(path)


def _demo() -> None:
    from sglang_qspec.models import demo_models

    models = demo_models(on_cuda=_has_cuda())
    print(f"target {models.target}")
    print(f"draft {models.draft}")


def _quantize(options: argparse.Namespace) -> None:
    from sglang_qspec.models import quantize

    device: Literal["cpu", "cuda"] = options.device or ("cuda" if _has_cuda() else "cpu")
    folder = quantize(
        options.model, options.bits, options.group_size, options.output, device=device
    )
    print(folder)


def _has_cuda() -> bool:
    """Whether torch finds a GPU on this machine."""
    import torch

    return torch.cuda.is_available()


def _group_size(text: str) -> int | str:
    """Parse a group size; ValueError with what is allowed. `quantize` checks it for the model."""
    if text == "channel":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError("128, 64, 32 or channel") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qspec", description="Tools of sglang-qspec.")
    parser.add_argument("--version", action="version", version=f"sglang-qspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    models = commands.add_parser("models", help="write target and draft checkpoints")
    tasks = models.add_subparsers(dest="task", required=True, metavar="TASK")
    tasks.add_parser(
        "demo",
        help="build the demo models and print their folders",
        description="Build the demo models in the cache, without a network, and print their "
        "folders: a line 'target PATH', then a line 'draft PATH'.",
    )
    quantize = tasks.add_parser(
        "quantize",
        help="write a quantized draft model of a local checkpoint",
        description="Quantize the weights of a checkpoint by rounding to nearest, write them in "
        "GPTQ layout, and print the output folder.",
    )
    quantize.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    quantize.add_argument("--bits", type=int, required=True, help="4 or 8")
    quantize.add_argument(
        "--group-size",
        type=option(_group_size),
        metavar="N|channel",
        help="number of weights that share a scale: 128, 64, 32, or channel for all weights of an "
        "output channel; by default channel for 8 bits, and the largest number that fits for 4",
    )
    quantize.add_argument(
        "--for",
        dest="device",
        choices=("cpu", "cuda"),
        help="kind of device that runs the draft model; its kernels must take the shapes of the "
        "layers; by default cuda on a machine with a GPU, otherwise cpu",
    )
    quantize.add_argument("--output", type=Path, help="folder to create; default: in the cache")

    keys = commands.add_parser("keys", help="write a key file for a tcp link")
    keys.add_argument("path", type=Path, help="file to create; copy it to sidecar and servers")

    complete.add_options(
        commands.add_parser(
            "complete",
            help="print a completion of a running server and the draft source of its text",
            description=complete.DESCRIPTION,
        )
    )

    top.add_options(
        commands.add_parser(
            "top", help="show what a running server does", description=top.DESCRIPTION
        )
    )

    show.add_options(
        commands.add_parser(
            "show",
            help="serve a page that shows where each token of an answer comes from",
            description=show.DESCRIPTION,
        )
    )

    doctor.add_options(
        commands.add_parser(
            "doctor",
            help="check this machine and a pair of models before a server starts",
            description=doctor.DESCRIPTION,
        )
    )

    theory.add_options(
        commands.add_parser(
            "theory",
            help="predict the throughput of each pipeline, or fit the model to a measured run",
            description=theory.DESCRIPTION,
        )
    )

    commands.add_parser("sidecar", help="run a sidecar, which servers connect to", add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
