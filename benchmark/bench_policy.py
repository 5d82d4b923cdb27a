"""The tokens that a draft tree should hold: tokens per pass by policy and size of the tree.

Recorded requests are decoded again. In each pass the policy's tree is compared with the target's
answer, so the benchmark needs no model and its figures are exact for the recording. All completions
are there from the start, which is the best case of a drafter.

    python -m benchmark.bench_policy
    python -m benchmark.record --output spec.json --dataset spec_bench.jsonl --num-prompts 8
    python -m benchmark.bench_policy --recording spec.json

With `--mismatched` each request has the completions of another one, which shows how well a policy
notices a useless source.

A second table compares at equal rows what passes over a batch can verify: trees or chains of one
width, and ragged ones, whose rows go to the likeliest tokens of all requests. Each entry is the
output tokens of a request and pass. `steps` is the share of requests for which the draft model also
drafts ahead of the output. The batch is always full, and requests of the recording repeat.

The last line is JSON: `rows`, each with `policy`, `completions`, and `accept_len` by draft tokens;
and `batches`, each with `batch`, `completions`, `steps`, `shape`, and by the rows of a request
`accept_len` and `tokens_per_row`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmark.batch_replay import Shape, serve
from benchmark.harness.options import parser_of, positive
from benchmark.harness.output import print_record
from benchmark.replay import OWN, Recorded, accepted, load
from sglang_qspec.trie import RequestTrie, Source, TrieLimits, Trust
from sglang_qspec.trie._native import POLICIES

VOCAB = 1 << 18
ESTIMATE = POLICIES.index("estimate")


def main() -> None:
    options = _options()
    requests = load(options.recording)
    if options.mismatched:
        others = requests[len(requests) // 2 :] + requests[: len(requests) // 2]
        requests = [
            replace(request, draft_ids=other.draft_ids)
            for request, other in zip(requests, others, strict=True)
        ]
    rows = []
    print(f"{'policy':22} {'n':>2}  " + "".join(f"{width:>7}" for width in options.widths))
    for name, policy, learns, sources in _policies():
        for count in options.completions if Source.QUEUE in sources else [0]:
            lengths = [
                accept_length(requests, count, width, policy, learns=learns, sources=sources)
                for width in options.widths
            ]
            print(f"{name:22} {count:>2}  " + "".join(f"{length:7.2f}" for length in lengths))
            by_width = dict(zip(map(str, options.widths), lengths, strict=True))
            rows.append({"policy": name, "completions": count, "accept_len": by_width})
    batches = _batches(requests, options)
    record = {"benchmark": "policy", "requests": len(requests), "rows": rows, "batches": batches}
    print_record(record)


def _batches(requests: Sequence[Recorded], options: argparse.Namespace) -> list[dict[str, object]]:
    """Print the second table, and return its rows."""
    widths = options.rows
    print("\nbatch  n  steps  shape                " + "".join(f"{width:>7}" for width in widths))
    rows: list[dict[str, object]] = []
    for batch, count, steps, shape in product(
        options.batches, options.batch_completions, options.steps, Shape
    ):
        if steps and not any(request.step_drafts for request in requests):
            continue
        found = [
            serve(requests, shape, batch=batch, width=width, completions=count, steps=steps)
            for width in widths
        ]
        lengths = "".join(f"{one.accept_length:7.2f}" for one in found)
        print(f"{batch:>5} {count:>2}  {steps:<5}  {shape.value:19}  {lengths}")
        names = list(map(str, widths))
        rows.append(
            {
                "batch": batch,
                "completions": count,
                "steps": steps,
                "shape": shape.value,
                "accept_len": dict(zip(names, (one.accept_length for one in found), strict=True)),
                "tokens_per_row": dict(zip(names, (one.per_row for one in found), strict=True)),
            }
        )
    return rows


def _policies() -> list[tuple[str, int, bool, frozenset[Source]]]:
    """Name, number, whether it learns, and the allowed sources of each policy."""
    everything = frozenset(Source)
    own = frozenset({Source.PROMPT, Source.OUTPUT})
    fixed = [(name, number, False, everything) for number, name in enumerate(POLICIES)]
    return [
        *fixed,
        ("estimate, learning", ESTIMATE, True, everything),
        ("lookup, learning", ESTIMATE, True, own),
    ]


def accept_length(
    requests: Sequence[Recorded],
    completions: int,
    draft_tokens: int,
    policy: int,
    *,
    learns: bool,
    sources: frozenset[Source],
) -> float:
    """Output tokens per target pass over all requests, with trees of `draft_tokens` and a root."""
    limits = TrieLimits(vocab_size=VOCAB)
    trust = Trust(limits.max_match, learns)
    tokens = passes = 0
    for request in requests:
        trie = RequestTrie(request.prompt_ids, limits, trust=trust, sources=sources)
        for number, draft in enumerate(request.draft_ids[:completions]):
            trie.insert(Source.QUEUE, number, 0, 0, draft, greedy=number == 0)
        target, done = request.target_ids, 1
        trie.commit(target[:1])
        while done < len(target):
            tree = trie.propose(draft_tokens + 1, policy)
            nodes = accepted(tree.token_ids, tree.parents, len(tree), target, done)
            step = target[done : done + len(nodes) + 1]
            trie.commit(step)
            done += len(step)
            passes += 1
        tokens += done - 1
    return tokens / passes


def _options() -> argparse.Namespace:
    parser = parser_of("bench_policy", __doc__)
    add = parser.add_argument
    add("--recording", type=Path, default=OWN, help="(default: completions.json)")
    add("--mismatched", action="store_true", help="give each request the drafts of another one")
    add("--completions", type=positive, nargs="+", default=[1, 2, 4, 8])
    add("--widths", type=positive, nargs="+", default=[4, 8, 16, 32], help="draft tokens")
    batches = "requests of a batch (default: 2 8 32)"
    add("--batches", type=positive, nargs="+", default=[2, 8, 32], help=batches)
    counts = "completions in batches (default: 1 8)"
    add("--batch-completions", type=positive, nargs="+", default=[1, 8], help=counts)
    shares = "shares of requests with step drafts in batches (default: 0 0.5 1)"
    add("--steps", type=float, nargs="+", default=[0.0, 0.5, 1.0], help=shares)
    each = "rows of a request in batches, on average (default: 2 4 8 16)"
    add("--rows", type=positive, nargs="+", default=[2, 4, 8, 16], help=each)
    return parser.parse_args()


if __name__ == "__main__":
    main()
