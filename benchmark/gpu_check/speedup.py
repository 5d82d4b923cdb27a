"""Measures tokens per second with and without QSPEC, of a pair that costs as much as 8B and 0.5B.

Both models are padded demo models (`padded`), so the target writes real text, and the draft model,
a copy with 4-bit weights, agrees with it as far as that copy does. Both servers are ready at once
on the same GPU, the draft model too, and serve each load in turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice, product, starmap
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.gpu_check import plain
from benchmark.gpu_check.findings import NotHereError, Options, Steps
from benchmark.gpu_check.padded import pad
from benchmark.gpu_check.serving import settings
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.dataset import render, token_ids
from benchmark.harness.report import Table, fields
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.serving import keep_in_flight, serve
from benchmark.harness.speculation import update_settings, wait_for_sidecar
from benchmark.peers.servers import SGLANG, ask
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import demo_models
from sglang_qspec.tools.models.demo import demo_draft
from sglang_qspec.tools.models.quantize import rounded

QSPEC = "QSPEC"
LEVELS = (1, 4, 16, 64)
ARRIVALS = ("steady", "queue")
"""`steady`: a request comes when another one ends. `queue`: all come at once, and most wait."""
KINDS = ("greedy", "sampled")
LEAST = 12
"""Least number of requests of a load."""
EACH = 4
"""Number of requests of a load over those in flight."""
ANSWER_TOKENS = 128
PROMPT_TOKENS = 256
"""Bound of a prompt's length, for the size of the KV cache."""
IDLE_SECONDS = 0.5
MEM_FRACTION = "0.8"
"""Largest share of a GPU for a target beside a sidecar."""
LEAST_GIB = 70
"""Two targets, their KV caches and graphs, and the sidecar take about 60 GiB by estimate."""
TARGET = {"factor": 4, "intermediate": 36864}
"""Padding to 8.2 billion parameters."""
DRAFT = {"factor": 1, "intermediate": 9216}
"""Padding to 0.53 billion parameters."""
DRAFT_BITS = 4
STYLES = ("", " Write for children.", " Be formal.", " Give an example.", " Use short sentences.")
SENTENCES = range(2, 40)


class Traffic(NamedTuple):
    """How requests come."""

    kind: str
    """`greedy` or `sampled`."""
    arrival: str
    """One of ARRIVALS."""
    in_flight: int


def speedup(options: Options, steps: Steps) -> None:
    """Time steps without drafts, then serve steady and queued loads, greedy and sampled."""
    if options.on_gpu:
        _needs_memory()
    levels, tokens = ((1, 2), 8) if options.emulated else (LEVELS, ANSWER_TOKENS)
    with pair(options, steps) as (target, draft), ExitStack() as stack:
        shared = settings(options, target, draft, "bfloat16", max(levels), 2048)
        made = configurations(shared, tokens)
        servers = {each.name: each.server() for each in made}
        for server in servers.values():
            stack.callback(server.stop)
            server.launch()
        for server in servers.values():
            server.start()
        wait_for_sidecar(servers[QSPEC])
        with steps.check("steps without drafts"):
            time_plain_steps(list(servers.values()), options, steps)
        prompts = iter(token_ids(target, render(target, texts())))
        rows: list[dict[str, Any]] = []
        steps.found.figures["rows"] = rows
        steps.found.tables.append(table(rows))
        for load in starmap(Traffic, product(KINDS, ARRIVALS, levels)):
            count = load.in_flight if options.emulated else max(LEAST, EACH * load.in_flight)
            asked, first = list(islice(prompts, count)), list(islice(prompts, load.in_flight))
            with steps.check(f"{load.kind} {load.arrival} {load.in_flight}"):
                runs = [
                    measure(servers[each.name], each.has_sidecar, load, asked, first, tokens)
                    for each in made
                ]
                rows.append(compared(load, *runs))
                steps.found.tables[-1] = table(rows)


def _needs_memory() -> None:
    """Raise NotHereError unless both servers and the draft model fit on the GPU."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    if total < LEAST_GIB << 30:
        raise NotHereError(f"needs a GPU of {LEAST_GIB} GiB; this one has {total >> 30}")


def configurations(shared: Settings, tokens: int) -> tuple[Configuration, Configuration]:
    """No speculation and QSPEC, with a KV cache for answers of `tokens` tokens."""
    kv = max(8192, 2 * shared.slots * (PROMPT_TOKENS + tokens))
    # The server that loads last finds the memory that the other one has left.
    memory = ("--mem-fraction-static", MEM_FRACTION) if shared.on_gpu else ()
    flags = ("--max-total-tokens", str(kv), *memory)
    return (
        Configuration("no speculation", shared, flags, shared.target_cores),
        Configuration(QSPEC, shared, shared.qspec(*flags), shared.target_cores),
    )


def time_plain_steps(servers: Sequence[Server], options: Options, steps: Steps) -> None:
    """Compare decode steps without drafts, while the draft model idles."""
    batches, lengths = ((1, 2), (2, 6)) if options.emulated else (plain.BATCHES, plain.TOKENS)
    found = plain.measure(servers, batches, lengths)
    steps.found.figures["plain_rows"] = found
    columns = fields("kind", "requests", "plain_ms", "qspec_ms", "ratio")
    title = "Decode steps without drafts beside an idle draft model, in ms"
    steps.found.tables.append(Table.of(title, found, columns))


@contextmanager
def pair(options: Options, steps: Steps) -> Iterator[tuple[Path, Path]]:
    """Folders of the padded target and draft model; on a CPU, of the demo models."""
    if not options.on_gpu:
        demo = demo_models()
        yield demo.target, demo.draft
        return
    target = demo_models().target
    draft = rounded(demo_draft(DRAFT_BITS), target)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        made = Path(folder) / "target", Path(folder) / "draft"
        for name, source, path, size in zip(
            ("target", "draft"), (target, draft), made, (TARGET, DRAFT), strict=True
        ):
            steps.found.figures[f"{name}_parameters"] = pad(source, path, **size)
        yield made


def texts() -> list[str]:
    """Prompts of the project, each with many wishes for its answer."""
    wishes = [
        f"{style} Answer in {sentences} sentences." for sentences in SENTENCES for style in STYLES
    ]
    return [f"{prompt}{wish}" for wish in wishes for prompt in PROMPTS]


def measure(
    server: Server,
    has_sidecar: bool,
    load: Traffic,
    prompts: Sequence[list[int]],
    first: Sequence[list[int]],
    tokens: int,
) -> Run:
    """Serve the prompts of a load after those of `first`, each with `tokens` output tokens."""
    # The only setting of a running server that limits the running requests.
    update_settings(server, {"pp_max_micro_batch_size": load.in_flight})
    answer = partial(ask, SGLANG, server, kind=load.kind)
    clients = len(prompts) if load.arrival == "queue" else load.in_flight
    return serve(
        server,
        lambda: keep_in_flight(clients, answer, prompts, [tokens] * len(prompts)),
        lambda: keep_in_flight(load.in_flight, answer, first, [tokens] * len(first)),
        has_sidecar=has_sidecar,
        idle=IDLE_SECONDS,
    )


def compared(load: Traffic, without: Run, run: Run) -> dict[str, Any]:
    """The row of a load, from the runs without speculation and with QSPEC."""
    pairs = zip(without.answers, run.answers, strict=True)
    equal = sum(one.output_ids == other.output_ids for one, other in pairs)
    return {
        **load._asdict(),
        "plain_tokens_per_s": round(without.tokens_per_s, 1),
        "tokens_per_s": round(run.tokens_per_s, 1),
        "speedup": round(run.tokens_per_s / without.tokens_per_s, 3),
        "accept_len": round(run.accept_len, 2),
        "accepted": dict(run.accepted),
        "proposed": run.proposed,
        "drafted": run.drafted,
        "equal_share": round(equal / len(run.answers), 3) if load.kind == "greedy" else None,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = fields("kind", "arrival", "in_flight", "plain_tokens_per_s", "tokens_per_s")
    columns |= fields("speedup", "accept_len", "equal_share")
    note = "One round. The draft model shares the target's GPU."
    return Table.of("Speedups of a padded pair", rows, columns, note)
