"""Compares QSPEC with other servers on the same processors: vLLM, llama.cpp and plain SGLang.

    python -m benchmark.bench_peers --dataset spec_bench.jsonl --vllm vllm/bin/python --output out

All servers answer the same prompts greedily, with the same number of requests in flight. `qspec`
divides the processors by itself, and `qspec-pinned` has one for the target and another one for the
sidecar. The benchmark runs the peers that the command line names: vLLM, with and without its
speculation by n-grams, by an interpreter that has it; llama.cpp by the path of `llama-server` and a
GGUF file of the target. Servers take turns. Each number of requests in flight has prompts of its
own in each round, until the file has no more; a prompt that comes again may be in the cache of
every server. vLLM reads its own environment variables, such as VLLM_CPU_OMP_THREADS_BIND.

Answers have one length. Without speculation all requests of a batch then end in the same pass, and
the next ones share a prefill, which is rare in service. `--spread 0.5` draws lengths from half to
one and a half times that length. At the end of a load fewer requests are in flight, so `--prompts`
should be some times the largest level.

`--levels 8 --rounds 1 --prompts 8` takes some minutes; the ratios of one round have no spread.
`harness.session` says how a run is resumed and reported. `throughput.svg` shows tokens per second
by requests in flight.

The last line is JSON: `over_best_peer_min`, the smallest ratio of `qspec` over the fastest peer in
tokens per second; `over_best_peer`, this ratio by requests in flight; and `rows`, each with `peer`,
`in_flight`, `tokens_per_s`, `over_sglang`, `same` and `others_share`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmark.harness.configuration import facts_of
from benchmark.harness.dataset import fitting, mixed, of_round
from benchmark.harness.journal import digest
from benchmark.harness.options import add_run, parsed, parser_of, positive, settings_of
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.session import Session, rounded_up
from benchmark.peers.load import Cell, cells_of, lengths_of, serve
from benchmark.peers.servers import WIDTH, Programs, configuration
from benchmark.peers.summary import Summary

NAME = "bench_peers"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    longest = options.longest_prompt + options.max_new_tokens + 2 * WIDTH
    settings = settings_of(options, max(options.levels), rounded_up(longest, 256))
    texts = mixed(fitting(NAME, options.dataset, settings.model, options.longest_prompt)[0])
    prompts = token_ids(settings.model, texts)
    names = ("levels", "prompts", "longest_prompt", "max_new_tokens", "spread")
    shown = {name: getattr(options, name) for name in names}
    header = {name: str(value) for name, value in shown.items()} | {"texts": digest(prompts)}
    session = Session(NAME, options, Cell, settings, header)

    def measure(server: Server, cell: Cell) -> Run:
        warm_up, asked = prompts_of(cell, prompts, options.levels, options.prompts)
        lengths = lengths_of(asked, options.max_new_tokens, options.spread)
        return serve(server, cell, warm_up, asked, lengths)

    session.serve(
        cells_of(options.configs, options.levels, options.rounds),
        lambda cell: configuration(cell.config, settings, options.programs),
        measure,
    )
    summary = Summary(session.journal.runs)
    report = summary.report(session.failed, facts_of(settings, **shown))
    code = session.finish(report, {**summary.record(), "failed": session.failed})
    return code or int(bool(session.failed))


def prompts_of(
    cell: Cell, prompts: Sequence[list[int]], levels: Sequence[int], count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of a cell's warm-up, one for each request in flight, and the measured ones.

    Each level of each round has prompts of its own, until the file has no more.
    """
    each = count + max(levels)
    number = 1 + (cell.round - 1) * len(levels) + list(levels).index(cell.in_flight)
    found = of_round(prompts, each, number)
    return found[count : count + cell.in_flight], found[:count]


def token_ids(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of texts in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(text).input_ids for text in texts]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL with prompts")
    add("--vllm", type=Path, help="a Python interpreter that has vLLM")
    add("--llama-server", type=Path, help="llama.cpp's server; needs --llama-model")
    add("--llama-model", type=Path, help="the target as a GGUF file")
    add("--llama-draft", type=Path, help="the draft model as a GGUF file (default: none)")
    add("--configs", nargs="+", help="servers to run (default: all that can)")
    levels = "requests in flight (default: 1 2 4 8 16)"
    add("--levels", nargs="+", type=positive, default=[1, 2, 4, 8, 16], help=levels)
    add("--prompts", type=positive, default=24, help="prompts of a level (default: 24)")
    add("--longest-prompt", type=positive, default=512, help="in tokens (default: 512)")
    add("--rounds", type=positive, default=3, help="figures are medians over rounds (default: 3)")
    add("--max-new-tokens", type=positive, default=128, help="of an answer (default: 128)")
    spread = "largest deviation of an answer's length, as a share (default: 0)"
    add("--spread", type=float, default=0.0, help=spread)
    add_run(parser, "bfloat16")
    options = parsed(parser, argv)
    if (options.llama_server is None) != (options.llama_model is None):
        parser.error("--llama-server and --llama-model go together")
    if not 0 <= options.spread <= 1:
        parser.error(f"--spread: {options.spread:g} is not from 0 to 1")
    programs = Programs(
        options.vllm, options.llama_server, options.llama_model, options.llama_draft
    )
    unknown = sorted(set(options.configs or ()) - set(programs.names))
    if unknown:
        choices = ", ".join(programs.names)
        parser.error(f"--configs: {unknown[0]!r} cannot run; those that can: {choices}")
    options.programs, options.configs = programs, options.configs or programs.names
    options.levels = sorted(set(options.levels))
    return options


if __name__ == "__main__":
    raise SystemExit(main())
