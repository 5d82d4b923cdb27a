"""Computes the chance that the target accepts a draft token, by acceptance rule, on real logits.

The target samples an answer to each of twelve prompts. The draft model reads the same tokens, so
the benchmark has both distributions at each token. From them it computes the chance that the target
accepts a draft token, under each rule:

- `greedy`: the draft is the likeliest token of its model; it must equal the target's draw.
- `match`: the draft is drawn with the target's sampling seed; it must equal the target's draw.
- `match, N blocks`: as `match`, but the draft is drawn from the N blocks of 64 ids that hold the
  likeliest tokens.
- `reject`: the draft is drawn from its own distribution, and kept with the chance min(1, p / q).
- `reject, N ids`: as `reject`, but the draft is drawn from the N likeliest tokens. Their
  probabilities fit into the message.

    python -m benchmark.bench_acceptance

The last line is JSON: `rows` and the conditions. Each row has `temperature`, `rule`, `accepted`
(mean chance over all tokens) and `tokens_per_pass` (expected tokens of a pass over a chain of 8
tokens, by the chances along each answer).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmark.harness.child import draft_model
from benchmark.harness.dataset import render
from benchmark.harness.options import parser_of, positive
from benchmark.harness.output import print_record
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import demo_models
from sglang_qspec.verify.gumbel_argmax import gumbel_argmax

BLOCK = 64
BLOCKS = (8, 32)
IDS = (8, 16, 64)
WIDTH = 8


def main() -> None:
    options = _options()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    torch.manual_seed(0)
    target = Target(options.target_path or str(demo_models().target))
    sizes = {"max_total_tokens": 4096, "context_len": 2048, "mem_fraction": 0.05}
    path = options.draft_path or str(demo_models().draft)
    draft = draft_model(path, dtype=options.dtype, device="cpu", **sizes)
    rows = []
    print(f"{'temperature':>11}  {'rule':18}{'accepted':>9}{'tokens per pass':>17}")
    for temperature in options.temperatures:
        answers = target.answer(temperature, options.tokens, options.prompts)
        chances: dict[str, list[list[float]]] = {}
        for prompt_ids, token_ids, logits in answers:
            drafted = read_along(draft, prompt_ids, token_ids)
            shared = min(logits.shape[1], drafted.shape[1])  # the sidecar drafts no other ids
            p = torch.softmax(logits / temperature, -1)[:, :shared]
            q = torch.softmax(drafted[:, :shared].float() / temperature, -1)
            for rule, along in chances_of(p, q, options.rolls):
                chances.setdefault(rule, []).append(along.tolist())
        for rule, answers_chances in chances.items():
            every = [chance for along in answers_chances for chance in along]
            row = {
                "temperature": temperature,
                "rule": rule,
                "accepted": round(sum(every) / len(every), 4),
                "tokens_per_pass": round(tokens_per_pass(answers_chances), 2),
                "tokens": len(every),
            }
            rows.append(row)
            print(f"{temperature:>11}  {rule:18}{row['accepted']:>9}{row['tokens_per_pass']:>17}")
    record = {"benchmark": "acceptance", "rows": rows, "rolls": options.rolls}
    print_record(record)


class Target:
    """The target in float32, run by transformers."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._path = path
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def answer(
        self, temperature: float, tokens: int, prompts: int
    ) -> Iterator[tuple[list[int], list[int], Tensor]]:
        """Sample answers; yields prompt, answer, and the target's logits [answer, vocab]."""
        for text in render(Path(self._path), PROMPTS[:prompts]):
            prompt = self._tokenizer(text, return_tensors="pt", add_special_tokens=False)
            sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            kept = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
            answer = self._model.generate(**prompt, **sampled, **kept, max_new_tokens=tokens)
            (prompt_ids,) = prompt.input_ids.tolist()
            token_ids = answer.sequences[0, len(prompt_ids) :].tolist()
            yield prompt_ids, token_ids, torch.cat(answer.logits).float()


def read_along(draft: Any, prompt_ids: list[int], token_ids: list[int]) -> Tensor:
    """Logits [answer, vocab] of the draft model at each token of an answer."""
    row = draft.open()
    logits = [draft.extend([row], [prompt_ids]).clone()]
    logits += [draft.step([row], [token]).clone() for token in token_ids[:-1]]
    draft.close(row)
    return torch.cat(logits)


def chances_of(p: Tensor, q: Tensor, rolls: int) -> Iterator[tuple[str, Tensor]]:
    """Each rule, and its chances [answer] to accept a draft from `q` if the target draws from `p`.

    `p` and `q` are probabilities [answer, vocab].
    """
    yield "greedy", p.gather(1, q.argmax(-1, keepdim=True)).squeeze(1)
    yield "match", agreement(p, q, rolls)
    best = torch.nn.functional.pad(q, (0, -q.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).amax(-1)
    for count in BLOCKS:
        kept = torch.zeros_like(best).scatter_(1, best.topk(count).indices, 1.0)
        shortlist = q * kept.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]
        yield f"match, {count} blocks", agreement(p, shortlist, rolls)
    yield "reject", torch.minimum(p, q).sum(1)
    for count in IDS:
        likeliest, ids = q.topk(count)
        drawn = likeliest / likeliest.sum(1, keepdim=True)
        yield f"reject, {count} ids", torch.minimum(drawn, p.gather(1, ids)).sum(1)


def agreement(p: Tensor, q: Tensor, rolls: int) -> Tensor:
    """For each row, the share of `rolls` seeds with which `p` and `q` give the same token."""
    positions = torch.arange(len(p))
    alike = torch.zeros(len(p))
    for seed in range(rolls):
        seeds = torch.full((len(p),), seed)
        alike += gumbel_argmax(p, seeds, positions) == gumbel_argmax(q, seeds, positions)
    return alike / rolls


def tokens_per_pass(answers: list[list[float]]) -> float:
    """Expected tokens of a pass, the target's own token included: the mean over all positions."""
    lengths = []
    for along in answers:
        for start in range(len(along) - WIDTH + 1):
            length, chance = 1.0, 1.0
            for accepted in along[start : start + WIDTH - 1]:
                chance *= accepted
                length += chance
            lengths.append(length)
    return sum(lengths) / len(lengths)


def _options() -> argparse.Namespace:
    parser = parser_of("bench_acceptance", __doc__)
    add = parser.add_argument
    add("--target-path", help="target model (default: the demo model)")
    add("--draft-path", help="draft model (default: the demo model)")
    add("--dtype", default="bfloat16", help="dtype of the draft model's activations")
    add("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    add("--prompts", type=positive, default=len(PROMPTS))
    add("--tokens", type=positive, default=64, help="output tokens per prompt (default: 64)")
    add("--rolls", type=positive, default=20, help="draws per token (default: 20)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
