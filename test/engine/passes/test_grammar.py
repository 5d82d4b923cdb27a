"""Masks over draft trees, compared with those that a grammar fills token by token."""

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.arg_groups.choices import GRAMMAR_BACKEND_CHOICES
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from sglang.srt.parser.reasoning_parser import ReasoningParser
from transformers import AutoTokenizer

from sglang_qspec.engine.passes.sample import grammar
from sglang_qspec.tools.models import DemoModels
from sglang_qspec.trie import DraftTree, DraftTrees, Source

VOCAB = 49152
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
TEXTS = {"regex": "12, 3, 400, 5, 60, 7", "json": '{"name": "Zoë 東京", "age": 32}'}
GRAMMARS = {"regex": r"(\d{1,3}, ){5}\d{1,2}", "json": SCHEMA}


@pytest.fixture(scope="module")
def tokenizer(models: DemoModels) -> Any:
    return AutoTokenizer.from_pretrained(models.target)


@pytest.fixture(scope="module", params=[n for n in GRAMMAR_BACKEND_CHOICES if n != "none"])
def backend(request: pytest.FixtureRequest, tokenizer: Any) -> BaseGrammarBackend:
    """Each backend that `--grammar-backend` offers, as SGLang makes it."""
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend
    from sglang.srt.constrained.outlines_backend import OutlinesGrammarBackend
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    grammar.install(request.param)
    made: dict[str, Any] = {
        "xgrammar": lambda: XGrammarGrammarBackend(tokenizer, VOCAB, [2]),
        "outlines": lambda: OutlinesGrammarBackend(tokenizer, None),
        "llguidance": lambda: GuidanceBackend(tokenizer, n_vocab=VOCAB, eos_token_ids=[2]),
    }
    found: BaseGrammarBackend = made[request.param]()
    return found


@pytest.fixture(params=["answer", "reasoning"])
def either(
    request: pytest.FixtureRequest, backend: BaseGrammarBackend, tokenizer: Any
) -> BaseGrammarBackend:
    """The backend of a server without a reasoning parser, and with one."""
    if request.param == "answer":
        return backend
    return ReasonerGrammarBackend(backend, ReasoningParser("qwen3"), tokenizer)


def compiled(backend: BaseGrammarBackend, kind: str) -> Any:
    """A grammar for a new request, which reasons first if the backend has a reasoning parser."""
    key = kind, GRAMMARS[kind]
    if key not in backend.cache:
        backend.set_cache(key, backend._init_value_dispatch(key, True))
    found: Any = backend.cache[key].copy()
    return found


def forbidden(rows: torch.Tensor) -> torch.Tensor:
    """bool [N, VOCAB] of the rows of a mask."""
    if rows.dtype == torch.bool:
        return rows
    bits = rows.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1
    return bits.flatten(1)[:, :VOCAB] == 0


def row_of(found: Any) -> torch.Tensor:
    """The tokens that a grammar forbids next: bool [VOCAB]."""
    mask = found.allocate_vocab_mask(VOCAB, 1, "cpu")
    found.fill_vocab_mask(mask, 0)
    return forbidden(mask)[0]


def tree_along(rng: random.Random, text: list[int], size: int) -> DraftTree:
    """A tree of right tokens with wrong ones between them; its root is no token of the text."""
    ids, parents, depths = [0], [0], [0]
    for _ in range(size - 1):
        parent = rng.randrange(len(ids))
        depth = depths[parent]
        right = text[min(depth, len(text) - 1)]
        used = [ids[node] for node in range(1, len(ids)) if parents[node] == parent]
        wrong = [rng.randrange(VOCAB), 32 * rng.randrange(VOCAB // 32), 2, 7, 8, 9]
        wrong = [token for token in wrong if token not in used]
        token = right if right not in used and rng.random() < 0.7 else wrong[0]
        ids.append(token)
        parents.append(parent)
        depths.append(depth + 1)
    return DraftTree(tuple(ids), tuple(parents), (Source.GUESS,) * size, (1.0,) * size)


def expected(fresh: Any, tree: DraftTree, node: int) -> torch.Tensor | None:
    """The row of a node by accepting its path; None if the grammar forbids the path or has ended.

    `fresh` is a grammar in the state at the root.
    """
    path = []
    while node:
        path.append(tree.token_ids[node])
        node = tree.parents[node]
    for token in reversed(path):
        if fresh.is_terminated() or row_of(fresh)[token]:
            return None
        fresh.accept_token(token)
    return None if fresh.is_terminated() else row_of(fresh)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_each_node_has_the_mask_of_its_path(
    either: BaseGrammarBackend, tokenizer: Any, kind: str
) -> None:
    rng = random.Random(3)
    whole = [*tokenizer.encode(TEXTS[kind], add_special_tokens=False), 2]
    if isinstance(either, ReasonerGrammarBackend):
        whole = [5, *either.think_end_ids, *whole]
    compared = 0
    for start in range(0, len(whole), 6):
        tree = tree_along(rng, whole[start:], 9)
        found = compiled(either, kind)
        for token in whole[:start]:
            found.accept_token(token)
        before = row_of(found)
        mask = found.allocate_vocab_mask(VOCAB, len(tree.token_ids), "cpu")
        grammar.fill_tree(found, mask, tree.token_ids, tree.parents)
        assert torch.equal(row_of(found), before)
        for node in range(len(tree.token_ids)):
            fresh = compiled(either, kind)
            for token in whole[:start]:
                fresh.accept_token(token)
            row = expected(fresh, tree, node)
            if row is not None:
                assert torch.equal(forbidden(mask)[node], row)
                compared += 1
    assert compared > 8


def batch_of(*grammars: Any) -> Any:
    reqs = [SimpleNamespace(rid=str(n), grammar=g, to_finish=None) for n, g in enumerate(grammars)]
    info = SimpleNamespace(vocab_size=VOCAB, grammar_mask="of the prefill")
    return SimpleNamespace(reqs=reqs, sampling_info=info, has_grammar=any(grammars))


class Broken:
    """A grammar that fails at its `call`."""

    def __init__(self, whole: Any, call: str) -> None:
        self._whole, self._call = whole, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            raise RuntimeError("a fault of the grammar")
        return getattr(self._whole, name)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("call", ["fill_vocab_mask", "accept_token", "rollback", "is_terminated"])
def test_an_error_of_a_grammar_ends_only_its_request(
    backend: BaseGrammarBackend, tokenizer: Any, call: str, ragged: bool
) -> None:
    text = tokenizer.encode(TEXTS["regex"], add_special_tokens=False)
    tree = tree_along(random.Random(1), text, 6)
    trees = DraftTrees.of([tree] * 3, 6)
    owners, offsets = torch.arange(3).repeat_interleave(6), torch.arange(6).repeat(3)
    if ragged:
        trees = trees.cut(np.full(3, 5))
        kept = offsets < 5
        owners, offsets = owners[kept], offsets[kept]
    found = [compiled(backend, "regex") for _ in range(2)]
    batch = batch_of(found[0], None, Broken(found[1], call))
    verify_input: Any = SimpleNamespace(
        retrieve_next_token=torch.zeros(1), owners=owners, offsets=offsets
    )
    mask = grammar.grammar_mask(batch, trees, verify_input)
    assert mask is not None
    assert batch.sampling_info.grammar_mask is None
    assert len(mask.vocab_mask) == trees.rows
    assert torch.equal(forbidden(mask.vocab_mask)[0], row_of(found[0]))
    assert not forbidden(mask.vocab_mask)[trees.starts[1] : trees.starts[2]].any()
    good, _, bad = batch.reqs
    assert good.grammar is found[0]
    assert good.to_finish is None
    assert bad.grammar is None
    assert "a fault of the grammar" in bad.to_finish.message


def test_a_batch_without_grammars_has_no_mask() -> None:
    batch = batch_of(None, None)
    trees = DraftTrees.of([DraftTree((1,), (0,), (Source.GUESS,), (1.0,))] * 2, 1)
    assert grammar.grammar_mask(batch, trees, SimpleNamespace()) is None  # type: ignore[arg-type]
    assert batch.sampling_info.grammar_mask == "of the prefill"
