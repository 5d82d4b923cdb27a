"""Measures `qspec batch`: its own cost, and its throughput beside SGLang's client.

    python -m benchmark.bench_batch --client 20000
    python -m benchmark.bench_batch --serve --rounds 3

`--client N` sends N lines to a fake server in another process, which answers at once. It measures
lines/s, CPU time per line and the largest resident memory of the client. The fake server takes more
time for a line than the client, so lines/s are a lower bound of what the client can do.

`--serve` sends the demo prompts to real servers, one configuration after another (A B C A B C): the
batch with QSPEC, SGLang's `bench_serving` with QSPEC at an infinite request rate, and the batch
with a server without speculation. Every server has the same slots and both processors.

The last line is JSON: `client` with `lines`, `lines_per_s`, `cpu_us_per_line`, `check_seconds` and
`peak_mib`; and `serve`, rows with `config`, `tokens_per_s` (median over the rounds), `rounds` (each
value) and `accept_length`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.batch.client import Cost, run, write_input
from benchmark.harness.configuration import Settings, with_and_without
from benchmark.harness.options import (
    add_servers,
    parsed,
    parser_of,
    positive,
    settings_of,
)
from benchmark.harness.output import print_record, say
from benchmark.harness.report import Table
from benchmark.harness.server import Server
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.ports import free_port

FAKE_SLOTS = 64
"""Running requests that the fake server names, so that 128 lines are in flight."""
CLIENT_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "lines": lambda row: row["lines"],
    "lines/s": lambda row: row["lines_per_s"],
    "CPU us/line": lambda row: row["cpu_us_per_line"],
    "check s": lambda row: row["check_seconds"],
    "peak MiB": lambda row: row["peak_mib"],
}
SERVE_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "client and server": lambda row: row["config"],
    "tokens/s": lambda row: row["tokens_per_s"],
    "rounds": lambda row: ", ".join(map(str, row["rounds"])),
    "accept length": lambda row: row["accept_length"],
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("bench_batch", __doc__)
    add = parser.add_argument
    add("--client", type=positive, default=0, metavar="N", help="lines for the fake server")
    add("--serve", action="store_true", help="also ask real servers")
    add("--rounds", type=positive, default=3)
    add("--slots", type=positive, default=2, help="running requests of a real server")
    add("--max-tokens", type=positive, default=64)
    add_servers(parser, "bfloat16")
    parser.set_defaults(unpinned=True)
    options = parsed(parser, argv)
    if not options.client and not options.serve:
        parser.error("give --client N, --serve or both")
    record: dict[str, Any] = {"name": "bench_batch"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.client:
            record["client"] = measure_client(folder, options.client)
            print(Table.of("client", [record["client"]], CLIENT_COLUMNS).text())
        if options.serve:
            settings = settings_of(options, options.slots, 2048, 16384)
            record["serve"] = serve(folder, settings, options.rounds, options.max_tokens)
            print(Table.of("serve", record["serve"], SERVE_COLUMNS).text())
    print_record(record)
    return 0


def measure_client(folder: Path, lines: int) -> dict[str, Any]:
    """The figures of the client alone, with a fake server."""
    path = folder / "client.jsonl"
    write_input(path, lines)
    port = free_port()
    command = [sys.executable, "-m", "benchmark.batch.fake_server", "--port", str(port)]
    fake = subprocess.Popen([*command, "--slots", str(FAKE_SLOTS), "--forget"])
    try:
        time.sleep(2)
        output = folder / "client-out.jsonl"
        cost = run([path, "--output", output, "--url", f"http://127.0.0.1:{port}"])
    finally:
        fake.kill()
        fake.wait()
    with output.open("rb") as file:
        answers = sum(1 for _ in file)
    if answers != lines:
        raise RuntimeError(f"{lines} lines have {answers} answers")
    return {
        "lines": lines,
        "lines_per_s": round(lines / cost.seconds),
        "cpu_us_per_line": round(1e6 * cost.cpu_seconds / lines),
        "check_seconds": round(cost.wall_seconds - cost.seconds, 1),
        "peak_mib": round(cost.peak_bytes / 2**20),
    }


def serve(folder: Path, settings: Settings, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """The throughput of each client and server, in turn."""
    plain, qspec = with_and_without(settings)
    path = folder / "serve.jsonl"
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    chats = [{"messages": [{"role": "user", "content": text}], **sampling} for text in PROMPTS]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    found: dict[str, list[tuple[float, float | None]]] = {}
    with plain.server() as without, qspec.server() as server:
        without.pause()  # an idle scheduler keeps a core busy
        wait_for_sidecar(server)
        for number in range(rounds + 1):
            seen = {
                "batch, QSPEC": batch(folder, path, server),
                "bench_serving, QSPEC": bench_serving(folder, settings, server, tokens),
            }
            server.pause()
            without.resume()
            seen["batch, no speculation"] = batch(folder, path, without)
            without.pause()
            server.resume()
            say(f"round {number}: {seen}")
            for name, figures in seen.items() if number else ():  # the first round warms up
                found.setdefault(name, []).append(figures)
        without.resume()
    return [
        {
            "config": name,
            "tokens_per_s": round(statistics.median(speed for speed, _ in each), 1),
            "rounds": [round(speed, 1) for speed, _ in each],
            "accept_length": each[-1][1],
        }
        for name, each in found.items()
    ]


def batch(folder: Path, path: Path, server: Server) -> tuple[float, float | None]:
    """Tokens/s and accept length of `qspec batch`."""
    server.post("/flush_cache?timeout=30", {})
    output = folder / "out.jsonl"
    output.unlink(missing_ok=True)
    cost: Cost = run([path, "--output", output, "--url", server.url])
    return cost.tokens / cost.seconds, cost.accept_length


def bench_serving(
    folder: Path, settings: Settings, server: Server, tokens: int
) -> tuple[float, float | None]:
    """Output tokens/s and accept length that SGLang's client reports for the same prompts."""
    dataset, results = folder / "conversations.jsonl", folder / "results.jsonl"
    turns = [[{"content": text}, {"content": ""}] for text in PROMPTS]
    dataset.write_text("\n".join(json.dumps({"conversations": pair}) for pair in turns))
    results.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", server.url, "--model", str(settings.model), "--dataset-name", "custom"),
        *("--dataset-path", str(dataset), "--num-prompts", str(len(PROMPTS))),
        *("--sharegpt-output-len", str(tokens), "--output-file", str(results)),
        *("--request-rate", "inf", "--flush-cache", "--warmup-requests", "0"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    result = json.loads(results.read_text())
    return result["output_throughput"], round(result["accept_length"], 2)


if __name__ == "__main__":
    sys.exit(main())
