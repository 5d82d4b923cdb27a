"""SGLang's Triton kernel verifies chains with a window, a cap and sinks, and no tree with a window.

Triton's interpreter runs the kernel of `--attention-backend triton`. It reads `TRITON_INTERPRET`
when it is imported, so the test has its own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

COMPARED = """
import random

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.trie import DraftTrees
from test.trees import random_tree

HEADS, DIM, CAP, WIDTH = 2, 16, 0.7, 8
LENS = torch.tensor([40, 7])


def error(trees, window):
    # The largest difference from a dense softmax over the text that a node continues.
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2 * WIDTH, HEADS, DIM)
    keys, values = torch.randn(2, 64, HEADS, DIM)
    sinks, out = torch.randn(HEADS), torch.empty(2 * WIDTH, HEADS, DIM)
    before = LENS.clamp(max=window) if window > 0 else LENS
    slots = [torch.arange(int(end - count), int(end)) for end, count in zip(LENS, before)]
    texts = [torch.arange(int(length)) for length in LENS]
    masks = WIDTH * (LENS + WIDTH)
    extend_attention_fwd(
        query, key, value, out, keys, values,
        torch.arange(3, dtype=torch.int32) * WIDTH,
        torch.tensor([0, *before.cumsum(0).tolist()], dtype=torch.int32),
        torch.cat(slots),
        verify_input_of(trees, LENS, "cpu", full_mask=True).custom_mask,
        True,
        torch.tensor([0, *masks.cumsum(0).tolist()]),
        WIDTH, 1.0, 1.0, DIM**-0.5, CAP,
        sliding_window_size=window,
        sinks=sinks,
        window_kv_offsets=(LENS - before).int() if window > 0 else None,
    )
    worst = 0.0
    for row, text in enumerate(texts):
        for node in range(trees.sizes[row]):
            path, at = [], node
            while at:
                path.insert(0, at)
                at = int(trees.parents[row, at])
            own = row * WIDTH + torch.tensor([0, *path])
            seen_keys = torch.cat([keys[text], key[own]])
            seen = torch.cat([values[text], value[own]])
            if window > 0:
                seen_keys, seen = seen_keys[-1 - window :], seen[-1 - window :]
            scores = torch.einsum("hd,thd->ht", query[row * WIDTH + node], seen_keys) * DIM**-0.5
            scores = torch.cat([CAP * (scores / CAP).tanh(), sinks.unsqueeze(1)], 1)
            mixed = torch.einsum("ht,thd->hd", scores.softmax(1)[:, :-1], seen)
            worst = max(worst, float((mixed - out[row * WIDTH + node]).abs().max()))
    return worst


branching = DraftTrees.of([random_tree(random.Random(1), WIDTH)] * 2, WIDTH)
chains = branching.chains()
assert not branching.are_chains
for window in (-1, 3, 11, 30):
    assert error(chains, window) < 1e-4, window
assert error(branching, -1) < 1e-4
assert error(branching, 11) > 1e-2  # rows are not depths
"""


def test_a_window_over_a_chain_is_exact_and_over_a_tree_is_not() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", COMPARED]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
