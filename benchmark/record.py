"""Records the draft model's completions of each prompt, and the target's answer.

`bench_trie` replays such a recording, so it needs no model. `completions.json` beside this file is
a recording of our own prompts with the demo models:

    python -m benchmark.record --output benchmark/completions.json

Each recorded request has `prompt_ids`, `target_ids` (the greedy answer) and `draft_ids`, a list of
completions. The first completion is greedy; the others are sampled at `--temperature`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmark.harness.child import Child, draft_model
from benchmark.harness.options import parser_of, positive


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
    records = [
        {"prompt_ids": prompt, "target_ids": target[0], "draft_ids": draft}
        for prompt, target, draft in zip(prompts, targets, drafts, strict=True)
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
