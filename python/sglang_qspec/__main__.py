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
qspec serve-batches --folder F --url U     serve OpenAI's API of files and batches
qspec complete "prompt"                    print a completion and the draft source of its text
qspec show                                 serve a page that shows where each token comes from
qspec top                                  show what a running server does
qspec theory --alpha A --k K ...           predict the throughput of each pipeline
qspec plan --gpus N --tables T ...         predict what a deployment costs
qspec measure --url U --output FILE        measure the tables of qspec plan on a running server
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Collection, Sequence

from sglang_qspec import __version__
from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.complete.peers import printable

COMMANDS = {
    "doctor": ("doctor.command", "check this machine and a pair of models before a server starts"),
    "models": ("models.command", "write and compare draft models"),
    "keys": ("keys", "write a key file for a tcp link"),
    "batch": (
        "batch.command",
        "answer the lines of a file with a server of its own, or with running ones",
    ),
    "serve-batches": (
        "serve_batches.command",
        "serve OpenAI's API of files and batches with running servers",
    ),
    "complete": (
        "complete.command",
        "print a completion of a running server and the draft source of its text",
    ),
    "show": ("show.command", "serve a page that shows where each token of an answer comes from"),
    "top": ("top.command", "show what a running server does"),
    "theory": (
        "theory.command",
        "predict the throughput of each pipeline, or fit the model to a measured run",
    ),
    "plan": ("plan.command", "predict what a deployment costs"),
    "measure": ("measure.command", "measure the tables of qspec plan on a running server"),
}
"""The module of each command in `tools`, and its line in the help.

A module has DESCRIPTION and `add_options`, which sets the default `run`: a function of the options
that returns the text to print, the exit status, or None. Only the module of the command that runs
is imported.
"""


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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        options = _parse(arguments)
        result = options.run(options)
        if isinstance(result, str):
            print(result)
    except (QSpecError, OSError) as error:
        print(f"qspec: {printable(str(error))}", file=sys.stderr)
        return 1
    except RecursionError:
        print("qspec: a file has too many lists inside each other", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else 0


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


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; `server_arguments` are what `qspec batch` has after `--`."""
    end = len(arguments)
    if arguments[:1] == ["batch"] and "--" in arguments:
        end = arguments.index("--")
    given = argparse.Namespace(server_arguments=list(arguments[end + 1 :]))
    return _parser(arguments[:1]).parse_args(arguments[:end], given)


def _parser(names: Collection[str]) -> argparse.ArgumentParser:
    """A parser that knows all commands, and the options of those in `names`."""
    parser = argparse.ArgumentParser(prog="qspec", description="Tools of sglang-qspec.")
    parser.add_argument("--version", action="version", version=f"sglang-qspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (path, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help)
        if name in names:
            module = importlib.import_module(f"sglang_qspec.tools.{path}")
            command.description = module.DESCRIPTION
            module.add_options(command)
    commands.add_parser("sidecar", help="run a sidecar, which servers connect to", add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
