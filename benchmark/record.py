"""Record what the draft model completes of each prompt, and what the target answers.

`bench_trie` and `bench_policy` replay such a recording, so they need no model. `completions.json`
beside this file is one of our own prompts with the demo's models:

    python -m benchmark.record --output benchmark/completions.json

Each recorded request has `prompt_ids`, `target_ids` (greedy) and `draft_ids`, a list of completions
of which the first is greedy and the others are sampled at `--temperature`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def main() -> None:
    options = _options()
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1" if options.device == "cpu" else "0")
    from transformers import AutoTokenizer

    from sglang_qspec.models import demo_models

    models = demo_models()
    tokenizer = AutoTokenizer.from_pretrained(models.target)
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        )
        for text in _texts(options)
    ]
    targets = _in_a_process(str(models.target), prompts, 1, options)
    drafts = _in_a_process(str(models.draft), prompts, options.completions, options)
    records = [
        {"prompt_ids": prompt, "target_ids": target[0], "draft_ids": draft}
        for prompt, target, draft in zip(prompts, targets, drafts, strict=True)
    ]
    text = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    options.output.write_text(f"[\n{text}\n]\n")


def _in_a_process(
    model_path: str, prompts: list[list[int]], completions: int, options: argparse.Namespace
) -> list[list[list[int]]]:
    """SGLang loads one model to a process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(complete, model_path, prompts, completions, options).result()


def complete(
    model_path: str, prompts: list[list[int]], completions: int, options: argparse.Namespace
) -> list[list[list[int]]]:
    """For each prompt, its completions as token ids: the greedy one and then sampled ones."""
    from sglang_qspec.link import Peer
    from sglang_qspec.messages import Drafted, Submit
    from sglang_qspec.sidecar.draft_model import DraftModel, DraftModelOptions
    from sglang_qspec.sidecar.drafter import Drafter

    model = DraftModel(
        DraftModelOptions(model_path, device=options.device, max_total_tokens=64 * 1024)
    )
    drafter = Drafter(model, max_completion_tokens=options.max_new_tokens)
    for number, prompt_ids in enumerate(prompts):
        drafter.submit(
            Peer("record", b""),
            Submit(
                submission=number,
                token_ids=prompt_ids,
                base_len=0,
                max_new_tokens=options.max_new_tokens,
                completions=completions,
                temperature=options.temperature,
            ),
        )
    found: list[list[list[int]]] = [[[] for _ in range(completions)] for _ in prompts]
    while not drafter.idle:
        drafter.step()
        for _, drafted in drafter.take():
            assert isinstance(drafted, Drafted), drafted
            found[drafted.submission][drafted.completion] += drafted.token_ids
    return found


def _texts(options: argparse.Namespace) -> list[str]:
    if options.dataset is None:
        from benchmark.prompts import PROMPTS

        return list(PROMPTS)
    from benchmark.harness.dataset import by_group, load, spread

    groups = by_group(load(options.dataset))
    return [
        prompt.text for group in groups.values() for prompt in spread(group, options.num_prompts)
    ]


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, help="as for bench_queue; ours by default")
    parser.add_argument("--num-prompts", type=int, help="of each of the dataset's groups; all")
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
