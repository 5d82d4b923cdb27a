"""Measures how much sooner a draft model drafts with a head of its own.

    python -m benchmark.bench_draft_head --dataset spec_bench.jsonl --head HEAD

The head comes from `qspec models train-head --kind hydra --model DRAFT`. Two drafters share one
draft model on the sidecar's core, one with the head and one without, and take turns. Each drafts
one completion of a number of prompts, with the passes and the sampling of a sidecar and no server.
Only passes after those that read the prompts are timed.

The last line is JSON: `rows`, each with `completions` in a pass, `answers` (greedy or sampled),
`token_ms` and `token_ms_head`, the milliseconds of a pass for each completion's next token without
and with the head, `gain`, their ratio, with `gains` of each round, `verified`, the guesses that
passes verified for each token, and `right`, the share of right ones among them; and `worst_gain`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmark.harness.options import add_servers, parsed, parser_of, positive, settings_of
from benchmark.harness.output import print_record, say
from benchmark.harness.report import Table, fields
from benchmark.harness.statistics import rounded
from sglang_qspec.tools.models.prompts import chat_ids, load

if TYPE_CHECKING:
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.drafter import Drafter

ROWS = (1, 2, 8, 32)
LONGEST_PROMPT = 256
MEM_FRACTION = 0.08
TEMPERATURE = 0.7
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    **fields("completions", "answers"),
    "ms": itemgetter("token_ms"),
    "with head": itemgetter("token_ms_head"),
    "gain": itemgetter("gain"),
    "verified": lambda row: f"{row['verified']:.0%}",
    "right": lambda row: f"{row['right']:.0%}",
}


class Timed(NamedTuple):
    """What a drafter did after it had read the prompts."""

    tokens: int
    seconds: float
    guessed: int
    right: int

    def since(self, before: Timed) -> Timed:
        """The figures of what came after those of `before`."""
        return Timed(
            self.tokens - before.tokens,
            self.seconds - before.seconds,
            self.guessed - before.guessed,
            self.right - before.right,
        )

    def token_s(self, completions: int) -> float:
        """Seconds in which each completion gets a token."""
        return completions * self.seconds / self.tokens


def drafted(drafter: Drafter, prompts: Sequence[list[int]], tokens: int, *, greedy: bool) -> Timed:
    """Draft `tokens` tokens behind each prompt."""
    from sglang_qspec.link import Peer
    from sglang_qspec.messages import Close, Submit

    peer = Peer("benchmark", b"1")
    temperature = 0.0 if greedy else TEMPERATURE
    for number, prompt in enumerate(prompts):
        drafter.submit(
            peer,
            Submit(
                number,
                *(prompt, 0, tokens, 1, temperature),
                ignore_eos=True,
                greedy_first=greedy,
            ),
        )
    while not all(each.completions[0].token_ids for each in drafter.queue.prompts.values()):
        drafter.step()
    before = _figures(drafter)
    while not drafter.idle:
        drafter.step()
    drafter.take()
    for number in range(len(prompts)):
        drafter.close(peer, Close(number))
    return _figures(drafter).since(before)


def _figures(drafter: Drafter) -> Timed:
    found = drafter.statistics
    return Timed(
        found.drafted_tokens, found.pass_seconds, found.guessed_tokens, found.right_guesses
    )


def load_model(path: Path) -> DraftModel:
    """The draft model as a sidecar on a CPU has it, with states for a head."""
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    options = DraftModelOptions(
        str(path), dtype="bfloat16", device="cpu", mem_fraction=MEM_FRACTION, batch=2 * max(ROWS)
    )
    return DraftModel(options, keeps_states=True)


def main() -> None:
    parser = parser_of("bench_draft_head", __doc__)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL with prompts")
    add("--head", type=Path, required=True, help="a Hydra head of the draft model")
    add("--rounds", type=positive, default=3, help="figures are medians over rounds (default: 3)")
    add("--tokens", type=positive, default=64, help="of a completion (default: 64)")
    add_servers(parser, "bfloat16")
    options = parsed(parser, None)
    settings = settings_of(options, max(ROWS), 1024)
    os.sched_setaffinity(0, settings.sidecar_cores or os.sched_getaffinity(0))

    import torch
    from transformers import AutoTokenizer

    from sglang_qspec.sidecar.drafter import Drafter
    from sglang_qspec.sidecar.guesser import Guesser, OwnHead
    from sglang_qspec.sidecar.hydra_model import ReadyHydra

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    say(f"loading {settings.draft_model}")
    model = load_model(settings.draft_model)
    head = OwnHead(ReadyHydra(options.head, settings.draft_model, torch.device("cpu")))
    tokenizer = AutoTokenizer.from_pretrained(settings.draft_model)
    texts = [each.text for each in load(options.dataset)]
    ids = [each for each in chat_ids(tokenizer, texts) if len(each) <= LONGEST_PROMPT]
    plain = Drafter(model, slots=max(ROWS), apart=True)
    headed = Drafter(model, slots=max(ROWS), apart=True, guesser=Guesser(head))
    for drafter in (plain, headed):
        drafter.warm_up()
    rows: list[Mapping[str, Any]] = []
    taken = 0
    for answers in ("greedy", "sampled"):
        for count in ROWS:
            say(f"{answers} completions, {count} at a time")
            found: list[tuple[Timed, Timed]] = []
            for _ in range(options.rounds):
                prompts = [ids[(taken + place) % len(ids)] for place in range(count)]
                taken += count
                one, other = (
                    drafted(each, prompts, options.tokens, greedy=answers == "greedy")
                    for each in (plain, headed)
                )
                found.append((one, other))
            rows.append(row_of(count, answers, found))
    print("\n" + Table.of("the draft model with and without its head", rows, COLUMNS).text())
    print_record(rounded({"rows": rows, "worst_gain": min(row["gain"] for row in rows)}, 3))


def row_of(count: int, answers: str, found: Sequence[tuple[Timed, Timed]]) -> Mapping[str, Any]:
    """The figures of a number of completions, from the rounds without and with the head."""
    gains = [one.token_s(count) / other.token_s(count) for one, other in found]
    guessed = sum(other.guessed for _, other in found)
    return {
        "completions": count,
        "answers": answers,
        "token_ms": 1e3 * median(one.token_s(count) for one, _ in found),
        "token_ms_head": 1e3 * median(other.token_s(count) for _, other in found),
        "gain": median(gains),
        "gains": gains,
        "verified": guessed / sum(other.tokens for _, other in found),
        "right": sum(other.right for _, other in found) / max(1, guessed),
    }


if __name__ == "__main__":
    main()
