"""The command `qspec batch`: its options, its run and its exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from sglang_qspec import values
from sglang_qspec.errors import BatchError, ConfigError, QSpecError
from sglang_qspec.tools import declare
from sglang_qspec.tools.batch import own_server
from sglang_qspec.tools.batch.bucket import Bucket
from sglang_qspec.tools.batch.cluster import options as cluster_options
from sglang_qspec.tools.batch.depth import MAX_DEPTH
from sglang_qspec.tools.batch.http_server import HttpServer
from sglang_qspec.tools.batch.line_guesses import LineGuesses
from sglang_qspec.tools.batch.lines import Lines
from sglang_qspec.tools.batch.partial import Partials
from sglang_qspec.tools.batch.progress import Progress
from sglang_qspec.tools.batch.results import Results
from sglang_qspec.tools.batch.runner import Runner
from sglang_qspec.tools.batch.server import LineServer
from sglang_qspec.tools.batch.source import FileSource, LineSource, needs_ray
from sglang_qspec.tools.guesses import earlier
from sglang_qspec.tools.guesses.earlier import EarlierAnswers

logger = logging.getLogger(__name__)

DESCRIPTION = """Answer the lines of a JSONL file: in OpenAI's batch format, or with `prompt` or
`messages` in each line. Without --url the command starts a server with QSPEC on this machine, and
ends it. An interrupted or killed run goes on with --resume. The exit status is 0 if all lines have
an answer, and 3 if some are in the file of errors. docs/batch.md describes the formats."""
USAGE = (
    "qspec batch INPUT --output PATH [--model PATH [--draft-model PATH] | --url URL ...]\n"
    "                   [options] [-- FLAGS OF THE SERVER]"
)
WAY_ON = "the same command with --resume continues"
PARTIAL = ".partial.jsonl"
"""How the name of the file ends that has the texts of unfinished answers."""
FAILED = 3
"""Exit status if some lines are in the file of errors."""
MAX_FILES = 65536
MAX_TIMEOUT_S = 31 * 24 * 3600
"""Maximum wait for an answer, in seconds."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.usage = USAGE
    add = partial(declare.value, parser)
    add("input", "JSONL file with the requests; - reads standard input", metavar="INPUT")
    output = "file for the answers, or a URI such as s3://BUCKET/NAME that gets it at the end"
    add("--output", output, metavar="PATH", required=True)
    add(
        "--errors",
        "file for the lines that failed (default: the output's name with .errors.jsonl)",
        Path,
        "PATH",
    )
    resume = "keep the records of both files, and ask the rest"
    declare.switch(parser, "--resume", resume)
    declare.switch(parser, "--skip-invalid", "leave out lines that are not valid")
    earlier.add_option(parser)
    target = "the target: a folder, or a name on a hub (default: demo)"
    add("--model", target, metavar="PATH")
    add("--draft-model", "the draft model: a folder, or a name on a hub", metavar="PATH")
    add(
        "--url",
        "address of a running server, instead of an own one; may be given several times",
        metavar="URL",
        action="append",
    )
    add(
        "--max-tokens",
        "maximum length of the answers to lines without a max_tokens (default: the server's)",
        values.positive,
        "N",
    )
    add(
        "--in-flight",
        "number of lines that a server has at once (default: its running requests and 64 waiting "
        "ones, so that the sidecar can draft for them)",
        values.whole(1, MAX_DEPTH),
        "N",
    )
    seconds = values.whole(1, MAX_TIMEOUT_S)
    add("--timeout", "maximum wait for an answer, in seconds", seconds, "S", default=3600)
    cluster_options.add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, say: Callable[[str], object] = print) -> int:
    """Answer the lines, and return the exit status; `say` prints the summary.

    Raises QSpecError for options, input, output or servers that cannot be used.
    """
    try:
        return _run(options, say)
    except KeyboardInterrupt:  # `_answer` handles it while lines are asked
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace, say: Callable[[str], object]) -> int:
    bucket = _settle_output(options)
    errors = options.errors or _beside(options.output, ".errors.jsonl")
    _check(options, errors)
    stopped: int | None = None
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(Results.open(options.output, errors, resume=options.resume))
        if options.ray is not None:
            stack.enter_context(_cluster(options.ray))
        is_file = options.output.is_file()  # and no device such as /dev/null
        path = _beside(options.output, PARTIAL) if is_file else None
        partials = stack.enter_context(Partials.open(path, resume=options.resume))
        answers = stack.enter_context(EarlierAnswers.open(options.guesses_from))
        guesses = LineGuesses(partials, answers if options.guesses_from else None)
        source = _source(options)
        lines = Lines(source, options.max_tokens, options.skip_invalid, results.answered)
        if not source.can_be_read_once:
            lines.check()
        before = len(results.answered)
        progress = Progress(results, total=lines.total, before=before)
        try:
            if lines.total is None or lines.total > before:
                with _servers(options) as servers:
                    stopped = asyncio.run(_answer(options, servers, lines, progress, guesses))
        except QSpecError:
            if progress.settled:
                logger.warning("stopped: %s\n%s", progress.summary(), WAY_ON)
            raise
        if stopped is None:
            partials.remove()
    if stopped is not None:
        logger.warning("interrupted; %s", WAY_ON)
    elif lines.total is not None and progress.settled < lines.total:
        raise BatchError(f"{options.input} has changed since the batch began; {WAY_ON}")
    elif bucket is not None:
        for path in filter(Path.exists, (options.output, errors)):
            logger.info("%s has the records of %s", bucket.put(path, path.name), path)
    say(progress.summary())
    failed = results.failed + progress.failed
    if failed:
        say(f"{failed} failed lines are in {errors}")
    if stopped is not None:
        return 128 + stopped
    return FAILED if failed else 0


def _settle_output(options: argparse.Namespace) -> Bucket | None:
    """Make `output` a path; returns the folder of an object store that gets the file at the end.

    Raises ConfigError.
    """
    text = options.output
    folder, _, name = text.rpartition("/")
    if "://" not in text:
        options.output = Path(text)
        return None
    options.output = Path(name)
    if not name or not folder.partition("://")[2]:
        raise ConfigError(f"--output is {text!r}, but must be a path, or SCHEME://BUCKET/NAME")
    return Bucket("--output", folder)


def _beside(output: Path, ending: str) -> Path:
    """The path of the output with another ending than `.jsonl`."""
    return Path(str(output).removesuffix(".jsonl") + ending)


def _check(options: argparse.Namespace, errors: Path) -> None:
    """Raise ConfigError if options exclude each other."""
    own = {
        "--model": options.model,
        "--draft-model": options.draft_model,
        "flags after --": options.server_arguments,
    }
    given = [name for name, value in own.items() if value]
    if options.url and given:
        raise ConfigError(f"{given[0]} is for the command's own server, and excludes --url")
    cluster_options.settle(options)
    if options.draft_model and not options.model:
        raise ConfigError("--draft-model needs --model")
    if options.url and len({url.rstrip("/") for url in options.url}) < len(options.url):
        raise ConfigError("--url has the same address twice")
    paths = [Path(options.input), options.output, errors, _beside(options.output, PARTIAL)]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("INPUT, --output and --errors must be different files")


def _allow_connections() -> None:
    """Raise the limit on open files, because each line at a server has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _cluster(address: str) -> contextlib.AbstractContextManager[None]:
    """The connection to a Ray cluster. Raises QSpecError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray needs Ray: pip install 'sglang-qspec[ray]'")
    from sglang_qspec.tools.batch.cluster.session import connected

    return connected(address)


def _source(options: argparse.Namespace) -> LineSource:
    """The input of the options. Raises ConfigError if only Ray can read it."""
    path: str = options.input
    if not needs_ray(path):
        return FileSource(path)
    if options.ray is None:
        raise ConfigError(f"INPUT is {path!r}; URIs, folders and Parquet files need --ray")
    from sglang_qspec.tools.batch.cluster.dataset import RaySource

    return RaySource(path)


@contextlib.contextmanager
def _servers(options: argparse.Namespace) -> Iterator[Sequence[LineServer]]:
    """The servers of the options; not open yet."""
    limits = {"timeout": options.timeout, "in_flight": options.in_flight}
    if options.ray is not None:
        from sglang_qspec.tools.batch.cluster import fleet

        with fleet.servers(options) as found:
            yield found
    elif options.url:
        yield [HttpServer(url, **limits) for url in options.url]
    else:
        has_gpu = shutil.which("nvidia-smi") is not None
        models = options.model, options.draft_model
        flags, environment = own_server.launch_settings(*models, on_cuda=has_gpu)
        flags += options.server_arguments
        log = _beside(options.output, ".server.log")
        yield [own_server.OwnServer(flags, environment, log, **limits)]


async def _answer(
    options: argparse.Namespace,
    servers: Sequence[LineServer],
    lines: Lines,
    progress: Progress,
    guesses: LineGuesses,
) -> int | None:
    """Answer all lines; returns the number of the signal that ended the run, or None."""
    _allow_connections()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:
            task.cancel()
        received.append(number)

    for number in _SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, stop, number)
    try:
        async with progress.shown():
            permanent = None if options.ray is None else options.min_servers
            await Runner(servers, progress, guesses, permanent=permanent).run(lines.unanswered())
    except asyncio.CancelledError:
        return received[0]
    return None
