"""Compares one flag with plain SGLang, with parts of QSPEC, and with other servers: never slower?

    python -m benchmark.bench_peers --dataset spec_bench.jsonl --vllm vllm/bin/python --output out
    python -m benchmark.bench_peers --dataset spec_bench.jsonl --matrix --output out
    python -m benchmark.bench_peers --dataset spec_bench.jsonl --pipelines --output out

All servers may use all processors of the machine, except `qspec-pinned`, heads, and those of
`--pipelines`. `qspec` has a draft model and no other flag, and divides the processors by itself;
`qspec-pinned` has one for the target and another one for the sidecar; so have `head`, with the
head of `--head` in place of the draft model, and `head-beside`, with both. `sglang` is SGLang
without speculation, and `sglang-again` a second server like it, to show the machine's noise;
`lookups` is QSPEC without a draft model, `jacobi` the same with guesses that the target improves,
and `steps` has step drafts in every round.
The command line names the peers that run: vLLM, with and without its speculation by n-grams, by an
interpreter that has it; llama.cpp by the path of `llama-server` and a GGUF file of the target;
OpenVINO GenAI, with and without its lookups, by an interpreter that has it and the same file. vLLM
reads its own environment variables, such as VLLM_CPU_OMP_THREADS_BIND.

A load is a number of requests in flight (`--levels`), a kind of answers, and an arrival:

- `steady`: `--prompts` requests, of which the next one comes when another one has its answer;
- `wave`: all requests come at once to an idle server, and their answers have one length;
- `mixed`: the same with lengths from a quarter to one and three quarters of that length;
- `queue`: three times as many requests come at once, and the rest waits in the server's queue.

Answers are `greedy`, `sampled` (temperature 0.8, top-p 0.95), or greedy `json` by a schema. The
default is a steady load of greedy answers; `--matrix` has all others for `qspec`, `sglang`,
`sglang-again`, `lookups` and `steps`, which takes hours on a CPU. Peers have greedy answers only.
With answers of one length and without speculation, all requests of a steady batch or of a queue end
in the same pass, and the next ones share a prefill, which is rare in service. `--spread 0.5` draws
lengths from half to one and a half times that length for both. At the end of a load fewer requests
are in flight, so `--prompts` should be some times the largest level.

`--pipelines` compares the pipelines `auto`, `queue`, `ahead`, `sequential` and `halves` under
queues of greedy answers, for each `--k` (draft tokens of a request in a pass); `peers.pipelines`
describes them. `none` is SGLang without speculation on the target's processor alone. It takes hours
too; `--k 4 --levels 4 --rounds 1 --max-new-tokens 48` takes minutes.

Each load of a round has prompts of its own, until the file has no more; a prompt that comes again
may be in the cache of every server. `--levels 8 --rounds 1 --prompts 8` takes some minutes; the
ratios of one round have no spread. `harness.session` says how a run is resumed and reported; a
resumed run may have other `--configs`, `--k` and `--rounds`. `ratios.svg` shows tokens per second
of `qspec` over those of `sglang`, and `throughput.svg` those of all servers under the steady greedy
load.

The last line is JSON. The smallest ratios of `qspec` in tokens per second are `worst_over_plain`,
over `sglang`; `worst_over_best`, over the fastest of `sglang`, `lookups` and `steps` at each load;
and `over_best_peer_min`, over the fastest peer. `worst_again_over_plain` is the smallest ratio of
`sglang-again` over `sglang`, which only noise makes differ from 1. `mean_over_plain` has the
geometric mean over all loads by server and by requests in flight. `loads` has the ratios of each
load, and `rows` have speedups over `sglang`. Rows of pipelines also have `k`, `step_tokens`, `used`
(share of the passes by pipeline), `over_none`, and `over_sequential` with its `bound`;
`auto_over_best_min` is the smallest ratio of `auto` over another pipeline.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmark.harness.cells import Cell
from benchmark.harness.dataset import fitting, lengths_of, mixed, token_ids
from benchmark.harness.options import add_run, parsed, parser_of, positive, settings_of
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.serving import keep_in_flight, serve
from benchmark.harness.session import Session, rounded_up
from benchmark.harness.speculation import update_settings
from benchmark.harness.summary import Summary
from benchmark.peers.loads import ARRIVALS, QUEUED, STEADY, cells_of, prompts_of
from benchmark.peers.pipelines import BASELINE, DESCRIPTIONS, HALVES, PIPELINES
from benchmark.peers.servers import (
    AGAIN,
    JACOBI,
    LOOKUPS,
    NAMES,
    OWN,
    QSPEC,
    SAMPLINGS,
    SGLANG,
    STEPS,
    Programs,
    ask,
    configuration,
)
from benchmark.peers.summary import record_of, report_of

NAME = "bench_peers"
LEVELS = (1, 2, 4, 8, 16, 32, 64)
MATRIX = {
    "configs": (QSPEC, SGLANG, AGAIN, LOOKUPS, STEPS),
    "levels": LEVELS,
    "arrivals": ARRIVALS,
    "samplings": tuple(SAMPLINGS),
}
"""What `--matrix` serves, unless other options say otherwise."""
PIPELINED = {
    "configs": (BASELINE, SGLANG, *PIPELINES),
    "levels": LEVELS[:6],
    "arrivals": (QUEUED,),
}
"""What `--pipelines` serves, unless other options say otherwise."""
KS = (1, 2, 4, 8)
WIDTH = 16
"""Maximum width of a pass of a pipeline, in tokens of a request, unless k needs more."""
SPREAD = 0.75
"""Largest deviation of a `mixed` answer's length, as a share."""
WARM_UP_TOKENS = 32


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    width = max(WIDTH, *(k + 1 for k in options.k))
    longest_answer = round((1 + SPREAD) * options.max_new_tokens)
    # The drafts of two passes may reach beyond the longest answer.
    longest = options.longest_prompt + longest_answer + 2 * width
    settings = settings_of(options, max(options.levels), rounded_up(longest, 256))
    limit = options.longest_prompt
    texts = mixed(fitting(NAME, options.dataset, settings.model, limit, options.groups)[0])
    prompts = token_ids(settings.model, texts)
    names = ("levels", "arrivals", "samplings", "prompts", "longest_prompt", "max_new_tokens")
    shown = {name: getattr(options, name) for name in (*names, "spread", "idle")}
    session = Session(NAME, options, settings, shown, prompts)
    served = partial(configuration, settings=settings, programs=options.programs, width=width)

    def measure(server: Server, cell: Cell) -> Run:
        in_flight, is_own = cell["in_flight"], cell.config in OWN
        first, asked = prompts_of(cell, prompts, options)
        if is_own:
            # The only setting of a running server that limits the running requests.
            update_settings(server, {"pp_max_micro_batch_size": in_flight})
        if (pipeline := PIPELINES.get(cell.config)) is not None:
            update_settings(server, pipeline.runtime(cell["k"]))
            first *= 2  # queue drafts are made for requests that wait
        given = options.spread
        spread = {STEADY: given, QUEUED: given, "mixed": SPREAD}.get(cell["arrival"], 0.0)
        lengths = lengths_of(asked, options.max_new_tokens, spread)
        # A peer has no limit that changes, so its client keeps the rest of a queue.
        clients = len(asked) if is_own and cell["arrival"] == QUEUED else in_flight
        answer = partial(ask, cell.config, server, kind=cell["sampling"])
        return serve(
            server,
            lambda: keep_in_flight(clients, answer, asked, lengths),
            lambda: keep_in_flight(len(first), answer, first, [WARM_UP_TOKENS] * len(first)),
            has_sidecar=served(cell.config).has_sidecar,
            flush=False,
            idle=options.idle,
        )

    session.serve(cells_of(options), lambda cell: served(cell.config), measure)
    summary = Summary(session.journal.runs, SGLANG, NAMES)
    return session.finish(report_of(summary), record_of(summary))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__, DESCRIPTIONS)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL with prompts")
    add("--groups", nargs="+", help="groups to serve (default: all)")
    add("--vllm", type=Path, help="a Python interpreter that has vLLM")
    add("--llama-server", type=Path, help="llama.cpp's server; needs --gguf")
    add("--openvino", type=Path, help="a Python interpreter that has OpenVINO GenAI; needs --gguf")
    add("--gguf", type=Path, help="the target as a GGUF file, in float16 for OpenVINO")
    add("--gguf-draft", type=Path, help="llama.cpp's draft model as a GGUF file (default: none)")
    add("--head", type=Path, help="a head for the target, of `qspec models train-head`")
    add("--matrix", action="store_true", help="all levels, arrivals and samplings but steady loads")
    add("--pipelines", action="store_true", help="the pipelines by k and number of requests")
    ks = "draft tokens of a pipeline (default: 1 2 4 8)"
    add("--k", nargs="+", type=positive, default=KS, help=ks)
    running = "servers to run (default: qspec, qspec-pinned, sglang and all peers that can)"
    add("--configs", nargs="+", help=running)
    levels = "requests in flight (default: 1 2 4 8 16)"
    add("--levels", nargs="+", type=positive, help=levels)
    add("--arrivals", nargs="+", choices=(STEADY, *ARRIVALS), help="(default: steady)")
    add("--samplings", nargs="+", choices=list(SAMPLINGS), help="(default: greedy)")
    add("--prompts", type=positive, default=24, help="prompts of a steady load (default: 24)")
    add("--longest-prompt", type=positive, default=512, help="in tokens (default: 512)")
    add("--rounds", type=positive, default=3, help="figures are medians over rounds (default: 3)")
    add("--max-new-tokens", type=positive, default=128, help="of an answer (default: 128)")
    spread = "largest deviation of an answer's length, steady or queued, as a share (default: 0)"
    add("--spread", type=float, default=0.0, help=spread)
    add("--idle", type=float, default=3.0, help="seconds before a load (default: 3)")
    add_run(parser, "bfloat16")
    options = parsed(parser, argv)
    if (options.llama_server or options.openvino) and options.gguf is None:
        parser.error("--llama-server and --openvino need --gguf")
    for name, most in (("spread", 1), ("idle", 3600)):
        if not 0 <= getattr(options, name) <= most:
            parser.error(f"--{name}: {getattr(options, name):g} is not from 0 to {most}")
    files = (options.gguf, options.gguf_draft, options.head)
    programs = Programs(options.vllm, options.llama_server, options.openvino, *files)
    unknown = sorted(set(options.configs or ()) - set(programs.names))
    if unknown:
        choices = ", ".join(programs.names)
        parser.error(f"--configs: {unknown[0]!r} cannot run; those that can: {choices}")
    if options.matrix and options.pipelines:
        parser.error("--matrix and --pipelines exclude each other")
    parts = (AGAIN, LOOKUPS, JACOBI, STEPS, BASELINE, *PIPELINES)
    usual = {
        "configs": [name for name in programs.names if name not in parts],
        "levels": LEVELS[:5],
        "arrivals": (STEADY,),
        "samplings": ("greedy",),
    }
    chosen = MATRIX if options.matrix else PIPELINED if options.pipelines else {}
    for name, values in {**usual, **chosen}.items():
        if getattr(options, name) is None:
            setattr(options, name, values)
    options.programs = programs
    options.levels, options.k = sorted(set(options.levels)), sorted(set(options.k))
    odd = [level for level in options.levels if level > 1 and level % 2]
    if odd and HALVES in options.configs:
        parser.error(f"--levels: {odd[0]} requests cannot be split into equal halves")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
