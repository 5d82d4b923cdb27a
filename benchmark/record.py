"""Records the draft model's completions of each prompt, and the target's answer.

`bench_trie` and `bench_policy` replay such a recording, so they need no model. `completions.json`
beside this file is a recording of our own prompts with the demo models:

    python -m benchmark.record --output benchmark/completions.json

Each recorded request has `prompt_ids`, `target_ids` (the greedy answer) and `draft_ids`, a list of
completions. The first completion is greedy; the others are sampled at `--temperature`. Its
`step_drafts` are the tokens that the draft model drafts ahead of the output, while the target
commits token by token.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmark.harness.child import Child, draft_model
from benchmark.harness.options import parser_of, positive
from benchmark.replay import LOOKAHEAD


def main() -> None:
    options = _options()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1" if options.device == "cpu" else "0")
    from transformers import AutoTokenizer

    from sglang_qspec.tools.models import demo_models

    models = demo_models(on_cuda=options.device != "cpu")
    tokenizer = AutoTokenizer.from_pretrained(models.target)
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        )
        for text in _texts(options)
    ]
    # SGLang loads one model per process.
    targets = Child(completer, str(models.target), 1, options).ask(prompts)
    drafts = Child(completer, str(models.draft), options.completions, options).ask(prompts)
    texts = [(prompt, target[0]) for prompt, target in zip(prompts, targets, strict=True)]
    steps = Child(step_drafter, str(models.draft), options.device).ask(texts)
    records = [
        {"prompt_ids": prompt, "target_ids": target, "draft_ids": draft, "step_drafts": step}
        for (prompt, target), draft, step in zip(texts, drafts, steps, strict=True)
    ]
    lines = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    options.output.write_text(f"[\n{lines}\n]\n")


def completer(
    model_path: str, completions: int, options: argparse.Namespace
) -> Callable[[list[list[int]]], list[list[list[int]]]]:
    """In a child: load the model; returns a function from prompts to their completions.

    Prompts and completions are token ids. The first completion of a prompt is greedy, and the
    others are sampled.
    """
    from sglang_qspec.link import Peer
    from sglang_qspec.messages import Drafted, Submit
    from sglang_qspec.sidecar.drafter import Drafter

    model = draft_model(model_path, device=options.device, max_total_tokens=64 * 1024)
    limits = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}

    def complete(prompts: list[list[int]]) -> list[list[list[int]]]:
        drafter = Drafter(model, max_completion_tokens=options.max_new_tokens)
        for number, prompt_ids in enumerate(prompts):
            asked = Submit(number, prompt_ids, base_len=0, completions=completions, **limits)
            drafter.submit(Peer("record", b""), asked)
        found: list[list[list[int]]] = [[[] for _ in range(completions)] for _ in prompts]
        while not drafter.idle:
            drafter.step()
            for _, drafted in drafter.take():
                assert isinstance(drafted, Drafted), drafted
                found[drafted.submission][drafted.completion] += drafted.token_ids
        return found

    return complete


def step_drafter(
    model_path: str, device: str
) -> Callable[[list[tuple[list[int], list[int]]]], list[list[tuple[int, list[int]]]]]:
    """In a child: load the model; returns a function from (prompt, output) to step drafts.

    The output is committed token by token, and the drafter runs ahead of it as on a server. A step
    draft is the length of the output where it begins, and its tokens.
    """
    from sglang_qspec.link import Peer
    from sglang_qspec.messages import Admit, Commit, Commits, Drafted, Submit
    from sglang_qspec.sidecar.drafter import Drafter

    model = draft_model(model_path, device=device, max_total_tokens=64 * 1024)
    server = Peer("record", b"")

    def draft(texts: list[tuple[list[int], list[int]]]) -> list[list[tuple[int, list[int]]]]:
        drafter = Drafter(model)
        found: list[dict[int, tuple[int, list[int]]]] = [{} for _ in texts]
        for number, (prompt_ids, output_ids) in enumerate(texts):
            length = len(output_ids) + LOOKAHEAD
            asked = Submit(
                number, prompt_ids, 0, max_new_tokens=length, completions=0, temperature=0.0
            )
            drafter.submit(server, asked)
            drafter.admit(server, Admit(number))
        done = [0] * len(texts)
        ready = set(range(len(texts)))
        while ready:
            commits = []
            for number in ready:
                fresh = texts[number][1][done[number] : done[number] + 1]
                if fresh:
                    commits.append(Commit(number, done[number], fresh, LOOKAHEAD))
                    done[number] += 1
            drafter.follow(server, Commits(commits))
            # A request with a complete draft continues while the others are drafted.
            ready = set()
            while not ready and not drafter.idle:
                drafter.step()
                for _, drafted in drafter.take():
                    if isinstance(drafted, Drafted):
                        drafts = found[drafted.submission]
                        _, token_ids = drafts.setdefault(drafted.completion, (drafted.base_len, []))
                        token_ids += drafted.token_ids
                        if drafted.finished:
                            ready.add(drafted.submission)
            if not ready:
                ready = {n for n, (_, output_ids) in enumerate(texts) if done[n] < len(output_ids)}
        return [sorted(drafts.values()) for drafts in found]

    return draft


def _texts(options: argparse.Namespace) -> list[str]:
    if options.dataset is None:
        from benchmark.prompts import PROMPTS

        return list(PROMPTS)
    from benchmark.harness.dataset import by_group, spread
    from sglang_qspec.tools.models.prompts import load

    groups = by_group(load(options.dataset))
    return [
        prompt.text for group in groups.values() for prompt in spread(group, options.num_prompts)
    ]


def _options() -> argparse.Namespace:
    parser = parser_of("record", __doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="file of the recording")
    add("--dataset", type=Path, help="as for bench_queue (default: our own prompts)")
    add("--num-prompts", type=positive, help="prompts of each group (default: all)")
    add("--completions", type=positive, default=8, help="per prompt (default: 8)")
    add("--max-new-tokens", type=positive, default=256, help="(default: 256)")
    add("--temperature", type=float, default=0.6, help="of the draft model (default: 0.6)")
    add("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
