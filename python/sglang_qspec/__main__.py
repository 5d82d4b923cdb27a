"""The `qspec` command.

qspec doctor                               check this machine and a pair of models
qspec models demo                          build the demo models and print their folders
qspec models quantize --model M --bits 8   write a quantized draft model of a local checkpoint
qspec models skip-layers --model M --keep N --output D  write a self-draft with layers left out
qspec models convert FILE.gguf --output D  write a GGUF file as a Hugging Face checkpoint
qspec models compare --target T --draft D  measure what draft models would be worth for a target
qspec sidecar ...                          run a sidecar, which servers connect to
qspec keys PATH                            write a key file for a tcp link
qspec batch IN.jsonl --output OUT.jsonl    answer the lines of a file
qspec complete "prompt"                    print a completion and the draft source of its text
qspec show                                 serve a page that shows where each token comes from
qspec top                                  show what a running server does
qspec theory --alpha A --k K ...           predict the throughput of each pipeline
qspec plan --gpus N --tables T ...         predict what a deployment costs
qspec measure --url U --output FILE        measure the tables of qspec plan on a running server
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_qspec import __version__
from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.batch import command as batch
from sglang_qspec.tools.compare import command as compare
from sglang_qspec.tools.complete import command as complete
from sglang_qspec.tools.complete.peers import printable
from sglang_qspec.tools.doctor import command as doctor
from sglang_qspec.tools.models import command as models_command
from sglang_qspec.tools.plan import command as plan
from sglang_qspec.tools.plan import measure_command as measure
from sglang_qspec.tools.show import command as show
from sglang_qspec.tools.theory import command as theory
from sglang_qspec.tools.top import command as top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns 0, 1 after a QSpecError or an OSError, and 130 after Ctrl-C.

    Wrong usage exits with 2.

    `qspec doctor` also returns 1 if a server cannot start. docs/batch.md has the values of
    `qspec batch`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    if arguments[:1] == ["sidecar"]:  # has its own parser
        # The other commands do without torch and ZMQ, which take seconds to import.
        from sglang_qspec.sidecar.__main__ import main as sidecar

        return sidecar(arguments[1:]) or 0
    arguments, server_arguments = batch.divide(arguments)
    options = _parser().parse_args(arguments, argparse.Namespace(server_arguments=server_arguments))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        if options.command == "keys":
            _keys(options.path)
        elif options.command == "batch":
            return batch.run(options, lambda line: print(line, flush=True))
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
        else:
            print(options.run(options))
    except (QSpecError, OSError) as error:
        print(f"qspec: {printable(str(error))}", file=sys.stderr)
        return 1
    except RecursionError:
        print("qspec: a file has too many lists inside each other", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that the caller has closed.

    Otherwise the next files that are opened would get their descriptors, and with them what is
    printed. Reads of a closed standard input still fail.
    """
    while (descriptor := os.open(os.devnull, os.O_WRONLY)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


class _Formatter(logging.Formatter):
    """Leaves out what a terminal would obey: messages have texts of servers in them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _keys(path: Path) -> None:
    from sglang_qspec.link import keys  # imports ZMQ

    keys.create(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="qspec", description="Tools of sglang-qspec.")
    parser.add_argument("--version", action="version", version=f"sglang-qspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor.add_options(
        commands.add_parser(
            "doctor",
            help="check this machine and a pair of models before a server starts",
            description=doctor.DESCRIPTION,
        )
    )

    models = commands.add_parser(
        "models",
        help="write and compare draft models",
        description="Write target and draft checkpoints, and measure what draft models would be "
        "worth. docs/draft-models.md describes the tasks.",
    )
    tasks = models_command.add_options(models)
    compare.add_options(
        tasks.add_parser(
            "compare",
            help="measure what draft models would be worth for a target",
            description=compare.DESCRIPTION,
        )
    )

    commands.add_parser("sidecar", help="run a sidecar, which servers connect to", add_help=False)

    keys = commands.add_parser(
        "keys",
        help="write a key file for a tcp link",
        description="Write a key file for a tcp link between a separate sidecar and its servers.",
    )
    keys.add_argument(
        "path", type=Path, metavar="PATH", help="file to create; copy it to sidecar and servers"
    )

    batch.add_options(
        commands.add_parser(
            "batch",
            help="answer the lines of a file with a server of its own, or with running ones",
            description=batch.DESCRIPTION,
            usage=batch.USAGE,
        )
    )

    complete.add_options(
        commands.add_parser(
            "complete",
            help="print a completion of a running server and the draft source of its text",
            description=complete.DESCRIPTION,
        )
    )

    show.add_options(
        commands.add_parser(
            "show",
            help="serve a page that shows where each token of an answer comes from",
            description=show.DESCRIPTION,
        )
    )

    top.add_options(
        commands.add_parser(
            "top", help="show what a running server does", description=top.DESCRIPTION
        )
    )

    theory.add_options(
        commands.add_parser(
            "theory",
            help="predict the throughput of each pipeline, or fit the model to a measured run",
            description=theory.DESCRIPTION,
        )
    )

    plan.add_options(
        commands.add_parser(
            "plan", help="predict what a deployment costs", description=plan.DESCRIPTION
        )
    )

    measure.add_options(
        commands.add_parser(
            "measure",
            help="measure the tables of qspec plan on a running server",
            description=measure.DESCRIPTION,
        )
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
