"""Whether speculation that does not pay costs anything, and whether the adaptive width is the best.

    python -m benchmark.bench_worst_case --dataset spec_bench.jsonl --output results

Serves what cannot be drafted well, at several numbers of requests in flight, by a server without
speculation and by one with QSPEC, both with the same core for their target: guesses that are always
wrong and look right, a sidecar whose drafts are always wrong, prompts of random tokens at
temperature 1.5, and long contexts. With a dataset also Spec-Bench, where QSPEC's adaptive width is
compared with fixed ones on one server. All configurations of a block serve it one after another, in
an order that turns around from round to round; ratios are of one round, and medians over rounds.

Without a dataset, `--quick` takes some minutes. What was measured is written to `runs.jsonl` in the
output folder cell by cell: after a cut the same command with `--resume` goes on, also with other
cases, levels, widths and rounds, and with `--report-only` it reports what is there.

Ends with a line of JSON: `worst_ratio`, the least tokens per second of the adaptive width over no
speculation; `adaptive_over_best_fixed_min`, the least over the fastest fixed width; and `rows`,
each with `case`, `running`, `config`, `tokens_per_s`, `ratio`, `accept_length`,
`proposed_per_pass` and `others_share`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.harness import dataset
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.dataset import render
from benchmark.harness.fleet import Fleet
from benchmark.harness.journal import JournalError
from benchmark.harness.machine import machine, versions
from benchmark.harness.options import Hardware, add_output, add_servers, check, positive
from benchmark.harness.output import say
from benchmark.harness.server import reason
from benchmark.parallel.plan import mixed
from benchmark.worst import wrong_sidecar
from benchmark.worst.cases import BASELINE, BY_NAME, CASES, SPEC_BENCH, Block, blocks_of
from benchmark.worst.journal import Entry, Journal
from benchmark.worst.loads import Loads
from benchmark.worst.serving import Client
from benchmark.worst.summary import Summary

WIDTH = 16
"""Of the widest pass that the server can be set to, in tokens of a request."""
SLOTS = 32
TOTAL_TOKENS = 49152
"""Of the target's KV: short prompts of all slots, or a long one that all share."""
LONGEST_PROMPT = 256
"""Of Spec-Bench, in tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    # As an interrupt: servers are ended and what was measured is reported.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    hardware = Hardware.of(options)
    settings = settings_of(hardware, options)
    try:
        prompts = spec_bench(settings.model, options.dataset) if options.dataset else []
    except dataset.DatasetError as error:
        sys.exit(f"bench_worst_case: error: {error}")
    folder = options.output or Path(tempfile.mkdtemp(prefix="bench_worst_case_"))
    try:
        resumed = options.resume or options.report_only
        journal = Journal.open(folder, header_of(settings, prompts, options), resumed)
    except JournalError as error:
        sys.exit(f"bench_worst_case: error: {error}")
    say(f"results go to {folder}")
    interrupted, failed = False, {}
    if not options.report_only:
        blocks = blocks_of(options.cases, options.levels, options.widths, options.rounds)
        loads = Loads(settings.model, prompts, options.context, options.max_new_tokens)
        try:
            failed = serve(settings, blocks, loads, journal, options.free_gib)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted; --resume goes on with this run")
    finish(Summary(journal.entries), failed, settings, options, folder)
    return 130 if interrupted else 0 if journal.entries and not failed else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        prog="python -m benchmark.bench_worst_case",
        epilog="cases: " + "; ".join(f"{case.name}: {case.text}" for case in CASES),
    )
    add = parser.add_argument
    add("--dataset", type=Path, help="Spec-Bench's questions, or JSONL of `prompt`")
    names = [case.name for case in CASES]
    add("--cases", nargs="+", choices=names, help="(default: all; spec-bench with a dataset)")
    add("--levels", nargs="+", type=positive, help="requests that run at once (default: 1 8 32)")
    add("--widths", nargs="+", type=positive, help="fixed ones (default: 2 4 8 16)")
    add("--rounds", type=positive, help="over all cells; medians (default: 3)")
    add("--max-new-tokens", type=positive, help="of each answer (default: 96)")
    add("--context", type=positive, default=3072, help="tokens of a long prompt (default: 3072)")
    add("--quick", action="store_true", help="1 and 8 in flight, one round, 48 tokens, width 4")
    add("--dtype", default="bfloat16", help="of the target (default: bfloat16)")
    add_servers(parser)
    add_output(parser)
    options = parser.parse_args(argv)
    check(parser, options)
    if options.cases is None:
        options.cases = [name for name in names if name != SPEC_BENCH or options.dataset]
    if SPEC_BENCH in options.cases and options.dataset is None:
        parser.error("--cases spec-bench needs a --dataset")
    quick = options.quick
    options.levels = sorted(set(options.levels or ([1, 8] if quick else [1, 8, 32])))
    options.widths = sorted(set(options.widths or ([4] if quick else [2, 4, 8, 16])))
    options.rounds = options.rounds or (1 if quick else 3)
    options.max_new_tokens = options.max_new_tokens or (48 if quick else 96)
    if max(options.levels) > SLOTS:
        parser.error(f"--levels: at most {SLOTS} requests run at once")
    if not 2 <= options.widths[0] <= options.widths[-1] <= WIDTH:
        parser.error(f"--widths: each must be from 2 to {WIDTH}")
    return options


def settings_of(hardware: Hardware, options: argparse.Namespace) -> Settings:
    """Of all servers; not of what they are to serve, so that a run may go on with more of it."""
    longest = max(options.context, LONGEST_PROMPT) + options.max_new_tokens + 2 * WIDTH
    return Settings(
        hardware.model,
        hardware.draft_model,
        options.dtype,
        SLOTS,
        -(-longest // 512) * 512,
        hardware.on_gpu,
        hardware.target_cores,
        hardware.sidecar_cores,
    )


def spec_bench(model: Path, path: Path) -> list[str]:
    """The prompts of all groups in turn, in the chat template, those that are short enough."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    groups = dataset.by_group(dataset.load(path))
    texts = {name: render(model, [p.text for p in members]) for name, members in groups.items()}
    fitting = {
        name: [text for text in members if len(tokenizer(text).input_ids) <= LONGEST_PROMPT]
        for name, members in texts.items()
    }
    prompts = mixed(fitting)
    if not prompts:
        sys.exit(f"bench_worst_case: error: no prompt has at most {LONGEST_PROMPT} tokens")
    return prompts


def server_for(block: Block, config: str, settings: Settings, misled: str) -> Configuration:
    """The server of a cell; `misled` is the endpoint of the sidecar that is always wrong."""
    # The last of two such flags counts.
    common = ("--max-total-tokens", str(TOTAL_TOKENS)) if not settings.on_gpu else ()
    if config == BASELINE:
        return Configuration(BASELINE, settings, common, settings.target_cores)
    speculation = [*common, "--speculative-algorithm", "QSPEC"]
    speculation += ["--speculative-num-draft-tokens", str(WIDTH)]
    if BY_NAME[block.case].misled:
        speculation += ["--speculative-qspec-endpoint", misled]
        return Configuration("misled", settings, tuple(speculation), settings.target_cores)
    speculation += ["--speculative-draft-model-path", str(settings.draft_model)]
    if settings.on_gpu:
        speculation += ["--speculative-qspec-device", "cuda:0"]
    else:
        speculation += ["--speculative-qspec-mem-fraction", "0.08"]
    if settings.sidecar_cores:
        cores = ",".join(map(str, settings.sidecar_cores))
        speculation += ["--speculative-qspec-cores", cores]
    return Configuration("qspec", settings, tuple(speculation), settings.target_cores)


def serve(
    settings: Settings, blocks: Sequence[Block], loads: Loads, journal: Journal, free_gib: float
) -> dict[str, str]:
    """Every cell that the journal does not hold yet; why cells failed, by their names."""
    client = Client(vocab_size_of(settings.model), WIDTH)
    steps = [(b, config) for b in blocks for config in b.configs if not journal.holds(b, config)]
    failed: dict[str, str] = {}
    memory = None if settings.on_gpu else free_gib * 2**30
    with ExitStack() as stack:
        endpoint = ""
        if any(BY_NAME[block.case].misled for block, _ in steps):
            endpoint = stack.enter_context(
                wrong_sidecar.running(settings.model, settings.sidecar_cores)
            )
        fleet = stack.enter_context(Fleet(memory))
        for place, (block, config) in enumerate(steps, 1):
            name = f"{block.case}, {block.running} in flight, {config}"
            chosen = server_for(block, config, settings, endpoint)
            load = loads.of(block.case, block.running, block.round)
            try:
                run = client.serve(fleet.run(chosen), block, config, load)
            # ServerError is one; so is a sidecar that is not ready in time.
            except (RuntimeError, OSError) as error:
                failed[name] = reason(error)
                say(f"{name}: failed: {error}")
                fleet.drop(chosen)
                continue
            journal.add(Entry(block.round, block.case, block.running, config, run))
            say(f"[{place}/{len(steps)}] {name}: {run.tokens_per_s:.1f} tokens/s")
    return failed


def vocab_size_of(model: Path) -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(model).vocab_size
    return size


def header_of(
    settings: Settings, prompts: Sequence[str], options: argparse.Namespace
) -> dict[str, str]:
    """What must be the same for a run to be resumed."""
    return {
        "prompts": hashlib.sha256("\0".join(prompts).encode()).hexdigest(),
        "context": str(options.context),
        "max_new_tokens": str(options.max_new_tokens),
        **{name: str(value) for name, value in asdict(settings).items()},
        **versions(),
        "machine": machine(),
    }


def finish(
    summary: Summary,
    failed: dict[str, str],
    settings: Settings,
    options: argparse.Namespace,
    folder: Path,
) -> None:
    """Write tables and print them, and the line of JSON."""
    record: dict[str, Any] = {
        **summary.record(),
        "failed": failed,
        "command": shlex.join(sys.orig_argv),
        "machine": machine(),
        "versions": versions(),
        "settings": {name: str(value) for name, value in asdict(settings).items()},
        "max_new_tokens": options.max_new_tokens,
        "context": options.context,
    }
    (folder / "tables.md").write_text(summary.markdown(), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print("\n" + summary.table())
    print("proposed, accepted: draft tokens of a request in a pass; others: processor time")
    print(json.dumps(record))


if __name__ == "__main__":
    raise SystemExit(main())
