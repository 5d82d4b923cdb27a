"""The command `qspec serve-batches`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import ipaddress
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sglang_qspec import values
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools import declare
from sglang_qspec.tools.batch.bucket import Bucket
from sglang_qspec.tools.batch.depth import MAX_DEPTH
from sglang_qspec.tools.batch.http_server import HttpServer
from sglang_qspec.tools.plan import trace as traces
from sglang_qspec.tools.plan.command import tables_of
from sglang_qspec.tools.serve_batches import tenants
from sglang_qspec.tools.serve_batches.database import PostgresDatabase, SqliteDatabase
from sglang_qspec.tools.serve_batches.files import DATABASE, Files
from sglang_qspec.tools.serve_batches.state import State
from sglang_qspec.tools.serve_batches.store import Store

DESCRIPTION = """Serve OpenAI's API of files and batches (/v1/files, /v1/batches) with running
servers. docs/batches.md describes it."""
TIMEOUT_S = 24 * 3600
"""Maximum wait for an answer, in seconds; deadlines end most waits sooner."""
PROMPT_TOKENS, OUTPUT_TOKENS, SLOTS = 512, 256, 32
"""Requests for which the speed of a server is predicted, and how many of them run at once."""
NEEDED = ("starlette", "uvicorn", "python_multipart")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    add(
        "--url",
        f"address of a server; may be given several times (default: {declare.SERVER})",
        metavar="URL",
        action="append",
    )
    add("--folder", "folder of the files and the database", Path, "PATH", required=True)
    database = "URL of a PostgreSQL database that several services with this folder share"
    add("--database", database, metavar="postgresql://HOST/NAME")
    add("--host", "address to listen on", metavar="ADDRESS", default="127.0.0.1")
    add("--port", "port to listen on", values.whole(0, 65535), "PORT", default=30080)
    add("--keys", "TOML file of the tenants and their keys", Path, "PATH")
    add(
        "--in-flight",
        "number of lines that a server has at once, as of qspec batch",
        values.whole(1, MAX_DEPTH),
        "N",
    )
    tables = "tables as of qspec plan; the speed that they predict counts until it was measured"
    add("--tables", tables, metavar="FILE")
    bucket = (
        "URI of a bucket or a folder in it, such as s3://BUCKET, that gets copies of the output"
    )
    add("--output-bucket", bucket, metavar="URI")
    private = "let webhooks of the keys file go to addresses that are not public"
    declare.switch(parser, "--private-webhooks", private)
    strict = "let a batch fail at once if it cannot be done in its completion window"
    declare.switch(parser, "--strict-deadlines", strict)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal. Raises ConfigError for options that cannot be used."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the service needs {name}, which SGLang installs")
    # Both need optional packages.
    import uvicorn

    from sglang_qspec.tools.serve_batches.app import Api
    from sglang_qspec.tools.serve_batches.service import Service
    from sglang_qspec.tools.serve_batches.webhooks import Webhooks

    urls = options.url or [declare.SERVER]
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ConfigError("--url has the same address twice")
    if options.keys is None and not _is_loopback(options.host):
        raise ConfigError(f"--host is {options.host}, which others can reach; it needs --keys")
    known = tenants.Tenants() if options.keys is None else tenants.read(options.keys)
    expected = len(urls) * predicted(options.tables) if options.tables else 0.0
    uri = options.output_bucket
    bucket = None if uri is None else Bucket("--output-bucket", uri)
    with _opened(options) as (store, files):
        service = Service(
            State(store),
            files,
            lambda: [
                HttpServer(url, timeout=TIMEOUT_S, in_flight=options.in_flight, yields=True)
                for url in urls
            ],
            known,
            strict_deadlines=options.strict_deadlines,
            webhooks=Webhooks(private=options.private_webhooks),
            expected=expected,
            bucket=bucket,
        )
        uvicorn.run(
            Api(service, known).app(),
            host=options.host,
            port=options.port,
            log_level="warning",
            server_header=False,
        )
    return 0


@contextlib.contextmanager
def _opened(options: argparse.Namespace) -> Iterator[tuple[Store, Files]]:
    """The state and the files of the service. Raises ConfigError."""
    with contextlib.ExitStack() as stack:
        files = Files(options.folder, is_shared=options.database is not None)
        stack.callback(files.close)
        if options.database is None:
            store = Store(SqliteDatabase(options.folder / DATABASE))
        else:
            store = Store(PostgresDatabase(options.database))
        stack.callback(store.close)
        if store.is_shared:
            store.bind(files.identity(), is_empty=files.is_empty)
        yield store, files


def predicted(text: str) -> float:
    """Output tokens per second of a server with a sidecar, as `qspec plan` predicts them for a
    queue. Raises ConfigError."""
    # Simulation needs NumPy.
    from sglang_qspec.tools.plan.planner import Planner

    trace = traces.parse("batch:1000", PROMPT_TOKENS, OUTPUT_TOKENS)
    found = tables_of(text, None, trace.context)
    slots = min(SLOTS, found.passes.most_requests)
    gpus = found.gpus.target + found.gpus.sidecar
    return Planner(found, trace).plan(gpus, "auto", slots).rate


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
