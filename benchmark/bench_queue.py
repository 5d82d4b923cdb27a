"""Queue speculation against no speculation and n-gram speculation, on a set of prompts.

    python -m benchmark.bench_queue --dataset spec_bench.jsonl --num-prompts 20 --output results

The prompts are served in blocks: each block is up to `--block` prompts of one group, sent as one
queue to a server with few running slots and empty caches. All configurations serve a block before
the next one comes, in an order that turns around from block to block (A B C, C B A), and each is
compared with `none` over the same blocks. One server runs at a time, the others wait stopped, as
far as memory allows. On a CPU the target has one core and the sidecar another, by default; the
configurations `...-equal` have both for the target.

What was measured is written to `runs.jsonl` in the output folder block by block. After a cut, the
same command with `--resume` goes on, and with `--report-only` reports what is there: figures are
always of the blocks that all configurations have served. A request that fails is sent once more,
and a block that fails is served once more by a new server; then the configuration is left out.

Prints a table, writes it as Markdown, and PNGs and a report as one HTML file (figures need
matplotlib, of the extra `bench`), and ends with a line of JSON: `rows`, each with `config`,
`speedup`, `accept_len`, `match_rate`, `by_group` and `equal_hardware_speedup` (over no speculation
on the cores of target and sidecar together; what has no sidecar is given them as well), and that of
`qspec-8` once more outside.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.harness import charts, dataset
from benchmark.harness.configuration import Settings
from benchmark.harness.dataset import render
from benchmark.harness.fleet import Fleet
from benchmark.harness.journal import JournalError
from benchmark.harness.machine import machine, versions
from benchmark.harness.options import Hardware, add_output, add_servers, check, positive, rate
from benchmark.harness.output import say
from benchmark.harness.server import reason
from benchmark.queueing.configurations import DESCRIPTIONS, NAMES, configuration
from benchmark.queueing.figures import figures
from benchmark.queueing.journal import Entry, Journal
from benchmark.queueing.load import Block, Load, blocks_of
from benchmark.queueing.report import markdown, page, table
from benchmark.queueing.serving import BlockRun, serve
from benchmark.queueing.summary import Summary, summarize


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    # As an interrupt: servers are ended and what was measured is reported.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not charts.available():
        say(f"there will be no figures, since matplotlib is missing: {charts.INSTALL}")
    try:
        groups = dataset.by_group(dataset.load(options.dataset), options.groups)
    except dataset.DatasetError as error:
        sys.exit(f"bench_queue: error: {error}")
    settings = settings_of(options)
    load, skipped = load_of(groups, settings, options)
    folder = options.output or Path(tempfile.mkdtemp(prefix="bench_queue_"))
    header = {
        "load": load.digest,
        **{name: str(value) for name, value in asdict(settings).items()},
        **versions(),
        "machine": machine(),
    }
    resumed = options.resume or options.report_only
    try:
        journal = Journal.open(folder, header, resumed)
    except JournalError as error:
        sys.exit(f"bench_queue: error: {error}")
    say(f"results go to {folder}")
    configs = [name for name in NAMES if name in options.configs]
    run = Run(configs, settings, load, options.rounds, journal)
    interrupted = False
    if not options.report_only:
        memory = None if settings.on_gpu else options.free_gib * 2**30
        try:
            with Fleet(memory) as fleet:
                run.serve(fleet)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted; --resume goes on with this run")
    summary = summarize(journal.entries, configs, run.failed)
    finish(summary, load, skipped, settings, options, folder)
    return 130 if interrupted else 0 if summary.rows else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(
        description=summary,
        prog="python -m benchmark.bench_queue",
        epilog="configurations: "
        + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items()),
    )
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL of `prompt`")
    add("--groups", nargs="+", help="of the prompts to serve (default: all)")
    add(
        "--num-prompts",
        type=positive,
        metavar="N",
        help="this many of each group, evenly over it, so that G groups are G × N prompts "
        "(default: all)",
    )
    add("--configs", nargs="+", choices=NAMES, default=list(NAMES), help="to serve (default: all)")
    add("--rounds", type=positive, default=1, help="over all blocks; medians (default: 1)")
    add("--slots", type=positive, default=2, help="requests that run at once (default: 2)")
    add(
        "--block",
        type=positive,
        default=20,
        help="most prompts of a group that are one queue (default: 20)",
    )
    add("--max-new-tokens", type=positive, default=128, help="of each answer (default: 128)")
    add("--context-length", type=positive, default=2048, help="in tokens (default: 2048)")
    add("--request-rate", type=rate, default=math.inf, help="per second (default: inf, at once)")
    add(
        "--dtype",
        default="float32",
        help="of the target; float32 (the default) lets outputs be compared exactly, since "
        "bfloat16 kernels of different shapes may break ties differently",
    )
    add_servers(parser)
    add_output(parser)
    options = parser.parse_args(argv)
    check(parser, options)
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    found = Hardware.of(options)
    return Settings(
        found.model,
        found.draft_model,
        options.dtype,
        options.slots,
        options.context_length,
        found.on_gpu,
        found.target_cores,
        found.sidecar_cores,
    )


def load_of(
    groups: Mapping[str, Sequence[dataset.Prompt]], settings: Settings, options: argparse.Namespace
) -> tuple[Load, dict[str, int]]:
    """The prompts to serve, and how many of each group were too long for the context."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    limit = settings.context_length - options.max_new_tokens
    prompts: dict[str, Sequence[str]] = {}
    skipped: dict[str, int] = {}
    for group, members in groups.items():
        rendered = render(settings.model, [prompt.text for prompt in members])
        fitting = [text for text in rendered if len(tokenizer(text).input_ids) < limit]
        skipped[group] = len(rendered) - len(fitting)
        if fitting:
            prompts[group] = dataset.spread(fitting, options.num_prompts)
        say(f"{group}: {len(prompts.get(group, []))} prompts; {skipped[group]} are too long")
    if not prompts:
        sys.exit(f"bench_queue: error: no prompt has fewer than {limit} tokens")
    blocks = blocks_of(prompts, options.block)
    return Load(blocks, options.max_new_tokens, options.request_rate), skipped


class Run:
    """Blocks by configurations by rounds; what the journal holds already is left out."""

    def __init__(
        self,
        configs: Sequence[str],
        settings: Settings,
        load: Load,
        rounds: int,
        journal: Journal,
    ) -> None:
        self.failed: dict[str, str] = {}
        """Why configurations were left out."""
        self._configs = configs
        self._settings = settings
        self._load = load
        self._rounds = rounds
        self._journal = journal

    def serve(self, fleet: Fleet) -> None:
        steps = [step for step in self._steps() if not self._done(*step)]
        began = time.monotonic()
        for place, (number, name, block) in enumerate(steps, 1):
            if name in self.failed:
                continue
            run = self._serve_block(fleet, name, block)
            if run is None:
                continue
            self._journal.add(Entry(number, name, run))
            left = (time.monotonic() - began) / place * (len(steps) - place)
            tokens = sum(answer.tokens for answer in run.answers)
            say(
                f"[{place}/{len(steps)}] {block.group} {block.part + 1}, {name}: "
                f"{len(run.answers)} prompts, {tokens / run.seconds:.1f} tokens/s; "
                f"about {left / 60:.0f} min to go"
            )

    def _steps(self) -> list[tuple[int, str, Block]]:
        """(round, configuration, block), in the order in which they are served."""
        blocks = [
            (number, block) for number in range(1, self._rounds + 1) for block in self._load.blocks
        ]
        return [
            (number, name, block)
            for index, (number, block) in enumerate(blocks)
            for name in (self._configs[::-1] if index % 2 else self._configs)
        ]

    def _done(self, number: int, name: str, block: Block) -> bool:
        return self._journal.holds(number, name, block.group, block.part)

    def _serve_block(self, fleet: Fleet, name: str, block: Block) -> BlockRun | None:
        """None if it failed twice, the second time on a new server."""
        chosen = configuration(name, self._settings)
        why = ""
        for _ in range(2):
            try:
                return serve(fleet.run(chosen), chosen, block, self._load)
            # ServerError is one; so is a sidecar that is not ready in time.
            except (RuntimeError, OSError) as error:
                why = reason(error)
                say(f"{block.group} {block.part + 1}, {name}: failed: {error}")
                fleet.drop(chosen)
        self.failed[name] = why
        return None


def finish(
    summary: Summary,
    load: Load,
    skipped: Mapping[str, int],
    settings: Settings,
    options: argparse.Namespace,
    folder: Path,
) -> None:
    """Write the report and its figures, print the table and the line of JSON."""
    prompts: dict[str, int] = {}
    for block in load.blocks:
        prompts[block.group] = prompts.get(block.group, 0) + len(block.prompts)
    facts: dict[str, Any] = {
        "command": shlex.join(sys.orig_argv),
        "machine": machine(),
        "versions": versions(),
        "settings": {name: str(value) for name, value in asdict(settings).items()},
        "max_new_tokens": load.max_new_tokens,
        "request_rate": str(load.request_rate),
        "rounds": options.rounds,
        "blocks": f"{summary.blocks} of {options.rounds * len(load.blocks)} served",
        "prompts": prompts,
        "too_long": dict(skipped),
    }
    shown = {name: v if isinstance(v, str) else json.dumps(v) for name, v in facts.items()}
    drawn = figures(summary)
    for figure in drawn:
        if figure.png is not None:
            (folder / f"{figure.name}.png").write_bytes(figure.png)
    report = folder / "report.html"
    report.write_text(page(summary, drawn, shown), encoding="utf-8")
    (folder / "tables.md").write_text(markdown(summary), encoding="utf-8")
    print("\n" + table(summary))
    print(f"\nreport: {report}; figures beside it: {sum(f.png is not None for f in drawn)}")
    if not charts.available():
        print(f"figures need matplotlib: {charts.INSTALL}, then --report-only")
    equal = summary.equal_hardware_speedup
    record = {
        "rows": summary.records(),
        "equal_hardware_speedup": None if equal is None else round(equal, 3),
        **facts,
    }
    (folder / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    raise SystemExit(main())
