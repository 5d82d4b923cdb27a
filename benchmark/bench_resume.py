"""Measures what guesses save a batch: after kills, and with the answers of an earlier run.

    python -m benchmark.bench_resume

`qspec batch` asks real servers. On one without a draft model

- `first` has no guesses;
- `replay` has the texts of all answers as those of cut attempts, as after a kill;
- `rerun` has the answers of `first` (`--guesses-from`);
- `edited` has other custom_ids, and a tenth of the words of each prompt is replaced. It finds the
  answers of `first` by their prompts. `edited, no guesses` asks the same;
- `unrelated` and `first` take turns: the answers of other lines, and no guesses.

On a server with a draft model a batch runs undisturbed, and then once for each of client, server
and sidecar (`--victims`), which is killed `--kills` times, at intervals of `--interval` seconds.
The time in which the server starts again does not count. That of its sidecar does: the server
decodes without it.

The last line is JSON: `replay_pass_ratio`, passes of `replay` over those of `first`; `kill_loss`,
the time that a kill costs over 60 s, as the mean of `kill_loss_by`, which has it for each kind of
kill; `server_start_seconds` and `sidecar_start_seconds`, the time from a kill of the server until
it answers, and the time without a sidecar after that or after a kill of the sidecar;
`rerun_accept_len` and `edited_accept_len`; `edited_bound`, the accept length of `edited` if each
pass drafted the part of the earlier answer, or of its own so far, that is right for the most
tokens; `unrelated_cost`, one minus the median ratio of tokens/s of a round; `identical`, whether
all batches have the same answers to the same prompts, as they must in float32; `rows`, `kills` of
each kind and `unrelated_rounds`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.dataset import by_group, mixed, spread
from benchmark.harness.options import EXACT, add_servers, parsed, parser_of, positive, settings_of
from benchmark.harness.output import print_record, say
from benchmark.harness.report import Table
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.prompts import PROMPTS
from benchmark.resume.batches import Answers, cut_all, edited, run, swapped, write_lines
from benchmark.resume.bound import largest_accept_length
from benchmark.resume.kills import VICTIMS, Killed, KilledBatch
from sglang_qspec.tools.models.prompts import load

MINUTE_S = 60.0
PARTS = ("guesses", "kills")
EDITED = "edited-"
"""Begins the custom_ids of the edited prompts."""
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "batch": itemgetter("batch"),
    "tokens/s": itemgetter("tokens_per_s"),
    "accept length": itemgetter("accept_length"),
    "passes": itemgetter("passes"),
    "tokens": itemgetter("tokens"),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = settings_of(options, options.slots, 2048, 16384)
    record: dict[str, Any] = {"name": "bench_resume", "identical": True, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        if "guesses" in options.parts:
            measure_guesses(Path(folder), settings, options, record)
        if "kills" in options.parts:
            measure_kills(Path(folder), settings, options, record)
    print(Table.of("batches", record["rows"], COLUMNS).text())
    print_record(record)
    return 0


def measure_guesses(
    folder: Path, settings: Settings, options: argparse.Namespace, record: dict[str, Any]
) -> None:
    """Add what guesses save on a server without a draft model."""
    prompts = prompts_of(options)
    path = write_lines(folder / "in.jsonl", prompts, options.max_tokens)
    chance = random.Random(1)
    texts = [edited(prompt, prompts, chance) for prompt in prompts]
    other = write_lines(folder / "edited-in.jsonl", texts, options.max_tokens, EDITED)
    flags = ("--speculative-algorithm", "QSPEC")
    found: dict[str, Answers] = {}
    ratios = []
    with Configuration("QSPEC", settings, flags, settings.target_cores).server() as server:

        def batch(name: str, lines: Path, *more: str | Path) -> Answers:
            say(f"  {name}")
            found[name] = run(server.url, lines, folder / f"{name}.jsonl", *more)
            return found[name]

        say("a server without a draft model")
        run(server.url, write_lines(folder / "short", PROMPTS[:4], 16), folder / "warm-up")
        first, answers = batch("first", path), folder / "first.jsonl"
        cut_all(path, answers, folder / "replay.jsonl")
        replay = batch("replay", path, "--resume")
        rerun = batch("rerun", path, "--guesses-from", answers)
        plain = batch("edited, no guesses", other)
        changed = batch("edited", other, "--guesses-from", f"{answers},{path}")
        wrong = swapped(answers, folder / "swapped.jsonl")
        same, alike = [replay, rerun], changed.texts == plain.texts
        for number in range(1, options.rounds + 1):
            pair = [
                batch(f"unrelated {number}", path, "--guesses-from", wrong),
                batch(f"first {number}", path),
            ]
            same += pair
            ratios.append(pair[0].rate / pair[1].rate)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    pairs = [(text, first.texts[n.removeprefix(EDITED)]) for n, text in changed.texts.items()]
    record["rows"] += [each.row(name) for name, each in found.items()]
    record["identical"] &= alike and all(each.texts == first.texts for each in same)
    record |= {
        "replay_pass_ratio": round(replay.passes / first.passes, 3),
        "rerun_accept_len": round(rerun.accept_length, 2),
        "edited_accept_len": round(changed.accept_length, 2),
        "edited_bound": round(largest_accept_length(pairs, encode), 2),
        "unrelated_cost": round(1 - statistics.median(ratios), 3),
        "unrelated_rounds": [round(1 - ratio, 3) for ratio in ratios],
    }


def measure_kills(
    folder: Path, settings: Settings, options: argparse.Namespace, record: dict[str, Any]
) -> None:
    """Add what kills cost on a server with a draft model."""
    prompts = [f"{text} (Variant {part}.)" for part in range(options.variants) for text in PROMPTS]
    path = write_lines(folder / "long.jsonl", prompts, options.max_tokens)
    configuration = Configuration("QSPEC", settings, settings.qspec(), settings.target_cores)
    with configuration.server() as server:
        say("a server with a draft model")
        wait_for_sidecar(server)
        # Like the others, so that its time includes the start of the command.
        undisturbed = KilledBatch(server, path, folder / "whole.jsonl")
        whole = undisturbed.run(VICTIMS[0], 0, options.interval).answers
        say(f"  undisturbed: {whole.seconds:.0f} s")
        record["rows"].append(whole.row("undisturbed"))
        found = dict[str, Killed]()
        for victim in options.victims:
            wait_for_sidecar(server)
            batch = KilledBatch(server, path, folder / f"{victim}.jsonl")
            found[victim] = batch.run(victim, options.kills, options.interval)
            record["rows"].append(found[victim].answers.row(f"{victim} killed"))
            record["identical"] &= whole.texts == found[victim].answers.texts
    losses = {
        victim: (each.answers.seconds - whole.seconds) / max(1, each.kills) / MINUTE_S
        for victim, each in found.items()
    }
    record |= {
        "kill_loss": round(statistics.mean(losses.values()), 3),
        "kill_loss_by": {victim: round(loss, 3) for victim, loss in losses.items()},
        "kills": {victim: each.kills for victim, each in found.items()},
        "server_start_seconds": round(max(each.server_s for each in found.values()), 1),
        "sidecar_start_seconds": {
            victim: round(each.sidecar_s, 1) for victim, each in found.items() if each.sidecar_s
        },
        "undisturbed_seconds": round(whole.seconds, 1),
        "killed_seconds": {
            victim: round(each.answers.seconds, 1) for victim, each in found.items()
        },
    }


def prompts_of(options: argparse.Namespace) -> Sequence[str]:
    """The prompts to ask. Raises ConfigError."""
    if options.dataset is None:
        return PROMPTS
    groups = by_group(load(options.dataset), options.groups)
    texts = {name: [prompt.text for prompt in each] for name, each in groups.items()}
    return spread(mixed(texts), options.num_prompts)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench_resume", __doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    add("--slots", type=positive, default=4, help="running requests of a server (default: 4)")
    add("--max-tokens", type=positive, default=128, help="length of an answer (default: 128)")
    add("--dataset", type=Path, help="prompts of the part guesses: JSONL, or Spec-Bench's format")
    add("--groups", nargs="+", help="groups of the dataset (default: all)")
    add("--num-prompts", type=positive, default=12, help="of the dataset (default: 12)")
    add("--rounds", type=positive, default=3, help="rounds with unrelated guesses (default: 3)")
    add("--variants", type=positive, default=5, help="of each prompt that is killed (default: 5)")
    victims = "what is killed, each in a batch of its own (default: all)"
    add("--victims", nargs="+", choices=VICTIMS, default=VICTIMS, help=victims)
    add("--kills", type=positive, default=1, help="kills in a batch (default: 1)")
    add("--interval", type=positive, default=20, help="seconds between kills (default: 20)")
    add_servers(parser, "float32", EXACT)
    return parsed(parser, argv)


if __name__ == "__main__":
    raise SystemExit(main())
