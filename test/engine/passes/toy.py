"""Runs passes of a toy target; after the logits, all code of a pass is a server's real code.

The logits depend on the last token alone, so the tests can compute the distribution of texts. The
code after the logits is a server's: SGLang's batches of sampling parameters, its penalizers and its
sampler; trees, seeded draws, drawn drafts and acceptance as the worker calls them. Many requests
with the same parameters run at once, and each is a sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.sample.penalties import read_outputs
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.engine.requests.step_proposals import StepProposals
from sglang_qspec.messages import Candidates, Drafted
from sglang_qspec.trie import DraftTrees, Source
from sglang_qspec.verify.rejection import Proposals
from sglang_qspec.verify.sample import Draws, sample_probs

VOCAB = 6
STOP = 5
PROMPT = 9
"""Number of tokens of every prompt; nothing depends on their ids."""
FIRST = 0
"""The token from prefill, with which each output begins."""
LENGTH = 3
"""Number of output tokens after FIRST that make a text."""
TEXTS = list(itertools.product(range(VOCAB), repeat=LENGTH))
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
_NOISE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
DRAFTERS = {
    "good": torch.softmax(LOGITS + 0.5 * _NOISE, -1),
    "bad": torch.softmax(2 * _NOISE, -1),
    "adversarial": torch.nn.functional.one_hot(LOGITS.argmin(-1), VOCAB).float(),
}
"""Distribution of a draft token by the token before it, for each drafter: [VOCAB, VOCAB]."""
SHAPES = {"chain": (0, 0, 1, 2), "tree": (0, 0, 0, 1, 1, 2, 3)}
"""Parents of a tree's nodes."""


class Request:
    """The part of SGLang's request that a pass reads."""

    custom_logit_processor = None
    return_sampling_mask = False
    sampling_logprobs_mode = None
    eos_token_ids = frozenset({STOP})
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
    origin_input_ids = (0,) * PROMPT

    def __init__(self, params: dict[str, Any], number: int) -> None:
        self.sampling_params = SamplingParams(**params, sampling_seed=number)
        self.sampling_params.normalize(self.tokenizer)
        self.rid = str(number)
        self.output_ids = [FIRST]


class Batch:
    """The part of SGLang's batch that a pass reads."""

    device = "cpu"
    forward_mode = ForwardMode.TARGET_VERIFY
    cumulate_penalty_output_tokens = ScheduleBatch.cumulate_penalty_output_tokens

    def __init__(self, reqs: Sequence[Request]) -> None:
        self.reqs = reqs
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, VOCAB)

    @property
    def seq_lens(self) -> Tensor:
        """int64 [bs]: without the last token of the output, which the next pass reads."""
        lengths = [PROMPT + len(req.output_ids) - 1 for req in self.reqs]
        return torch.tensor(lengths, device=self.device)

    @property
    def last(self) -> Tensor:
        """int64 [bs]: the last token of each output, on the host."""
        return torch.tensor([req.output_ids[-1] for req in self.reqs])

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A pass, with its own copy of the sampling parameters, as the scheduler makes it."""
        kept, self.sampling_info = self.sampling_info, self.sampling_info.copy_for_forward()
        yield
        self.sampling_info = kept


@contextmanager
def engine(device: str = "cpu") -> Iterator[None]:
    """The global settings of a server's process on `device`, without seeded draws."""
    Batch.device = device
    sample_from_probs = Sampler._sample_from_probs
    group = SimpleNamespace(world_size=1, device_group=None)
    with (
        torch.compiler.set_stance("force_eager"),
        get_context().override_server_args(sampling_backend="pytorch"),
        get_parallel().override(tp_group=group),
    ):
        yield
    Sampler._sample_from_probs = sample_from_probs


@dataclass(frozen=True)
class Case:
    """How `speculate` makes texts."""

    params: dict[str, Any]
    drafter: str = "good"
    shape: str = "tree"
    reject: bool = False
    """Whether drafts are accepted by rejection sampling instead of matching."""
    ragged: bool = False
    """Whether a pass verifies a different number of tokens of each request."""


def speculate(case: Case, count: int) -> Tensor:
    """Counts of `TEXTS` among the texts of `count` requests: int64 [VOCAB ** LENGTH]."""
    torch.manual_seed(12)
    sampling_seeds.install()
    reqs = [Request(case.params, number) for number in range(count)]
    sidecar = _Sidecar(case)
    passes = 0
    while unfinished := [req for req in reqs if len(req.output_ids) <= LENGTH]:
        batch = Batch(unfinished)
        # Every third pass is plain, as if no draft had come in time.
        passes += 1
        with batch.forward():
            (_verify if passes % 3 else _decode)(batch, case, sidecar)
    return _count(reqs)


def decode_with_sglang(params: dict[str, Any], count: int) -> Tensor:
    """The same counts from SGLang's own plain passes, without code of ours."""
    torch.manual_seed(12)
    batch = Batch([Request(params, number) for number in range(count)])
    for _ in range(LENGTH):
        batch.cumulate_penalty_output_tokens()
        with batch.forward():
            _commit(batch, _sampled(batch).unsqueeze(1).tolist())
    return _count(batch.reqs)


def probability(params: dict[str, Any], text: Sequence[int]) -> float:
    """Probability of one of `TEXTS` by the definition of the parameters, in 64-bit numbers."""
    output, product = [FIRST], 1.0
    for token in text:
        product *= _plain_distribution(params, output)[token]
        output.append(token)
    return product


def distribution(params: dict[str, Any]) -> Tensor:
    """Probabilities of `TEXTS`: float64 [VOCAB ** LENGTH]."""
    return torch.tensor([probability(params, text) for text in TEXTS], dtype=torch.float64)


def _plain_distribution(params: dict[str, Any], output: list[int]) -> list[float]:
    """Probability of each token after `output`."""
    logits = LOGITS[output[-1]].tolist()
    repetition = params.get("repetition_penalty", 1.0)
    for token in range(VOCAB):
        times = output.count(token)
        logits[token] -= params.get("frequency_penalty", 0.0) * times
        if times:
            logits[token] -= params.get("presence_penalty", 0.0)
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        logits[token] += params.get("logit_bias", {}).get(str(token), 0.0)
    if len(output) < params.get("min_new_tokens", 0):
        logits[STOP] = -math.inf
    weights = [math.exp(logit / params["temperature"]) for logit in logits]
    probs = [weight / sum(weights) for weight in weights]
    kept, mass = [0.0] * VOCAB, 0.0
    for rank, token in enumerate(sorted(range(VOCAB), key=lambda token: -probs[token])):
        if (
            rank < params.get("top_k", VOCAB)
            and mass <= params.get("top_p", 1.0)
            and probs[token] >= max(probs) * params.get("min_p", 0.0)
        ):
            kept[token] = probs[token]
        mass += probs[token]
    return [chance / sum(kept) for chance in kept]


def _verify(batch: Batch, case: Case, sidecar: _Sidecar) -> None:
    """Run a verify pass as `QSpecWorker._verify` does, without a model."""
    trees = _trees(batch, sidecar.ahead(batch), case)
    if case.ragged:
        # The lengths depend on the draft tokens, as those that a policy chooses.
        trees = trees.cut(1 + (trees.token_ids[:, 1:3].sum(axis=1) + np.arange(len(trees))) % 7)
    verify_input = verify_input_of(trees, batch.seq_lens, batch.device, full_mask=False)
    of_nodes = LOGITS.to(batch.device)[verify_input.input_ids]
    logits: Any = SimpleNamespace(next_token_logits=of_nodes)
    with sampling_seeds.seeded_draws(batch, sidecar.proposals(batch, trees)):
        predict, accept_lens, accept_index = sample_and_accept(verify_input, batch, logits)
    tokens = predict[accept_index.clamp(min=0)].tolist()
    _commit(batch, [row[:n] for row, n in zip(tokens, accept_lens.tolist(), strict=True)])


def _decode(batch: Batch, case: Case, sidecar: _Sidecar) -> None:
    """Run a plain pass as `QSpecWorker._decode` does, without a model."""
    read_outputs(batch)
    sidecar.ahead(batch)
    with sampling_seeds.seeded_draws(batch, sidecar.proposals(batch)):
        _commit(batch, _sampled(batch).unsqueeze(1).tolist())


def _sampled(batch: Batch) -> Tensor:
    """A token for each request, by SGLang's sampler."""
    logits = LOGITS[batch.last].to(batch.device)
    batch.sampling_info.apply_logits_bias(logits)
    output: Any = SimpleNamespace(next_token_logits=logits)
    sampled: Tensor = Sampler()(output, batch.sampling_info, False, [], [], batch.seq_lens)
    return sampled


def _commit(batch: Batch, tokens: list[list[int]]) -> None:
    for req, row in zip(batch.reqs, tokens, strict=True):
        req.output_ids += row


def _count(reqs: Sequence[Request]) -> Tensor:
    texts = torch.tensor([req.output_ids[1 : 1 + LENGTH] for req in reqs])
    place = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    return torch.bincount((texts * place).sum(1), minlength=VOCAB**LENGTH)


def _trees(batch: Batch, drafted: Tensor, case: Case) -> DraftTrees:
    """The tree of each request's three draft tokens [bs, 3]: a chain, or one with siblings.

    The size of a tree depends on the draft tokens, as it does when trust chooses trees.
    """
    root, (one, two, three) = batch.last, drafted.unbind(1)
    parents = SHAPES[case.shape]
    nodes = [root, one, two, three]
    if case.shape == "tree":
        beside = (one + 1) % VOCAB
        nodes = [root, one, beside, two, (two + 1) % VOCAB, (beside + 2) % VOCAB, three]
    shape = (len(root), len(parents))
    return DraftTrees(
        torch.stack(nodes, 1).numpy().astype(np.int32),
        np.broadcast_to(np.array(parents, np.int32), shape).copy(),
        np.full(shape, Source.STEP, np.uint8),
        np.broadcast_to((1 / np.arange(1, len(parents) + 1)).astype(np.float32), shape).copy(),
        np.where(one.numpy() == 2, 1, len(parents)).astype(np.int32),
    )


class _Sidecar:
    """Draws draft tokens from the drafter's distribution, as the real sidecar does."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._probs = DRAFTERS[case.drafter]
        self._candidates = [_candidates(probs.double()) for probs in self._probs]
        self._drawn = StepProposals()
        self._generator = torch.Generator().manual_seed(5)
        self._drafts = itertools.count()

    def ahead(self, batch: Batch) -> Tensor:
        """Three draft tokens after each output: int64 [bs, 3]."""
        if not self._case.reject:
            return self._with_the_targets_seeds(batch)
        texts = self._with_its_own_generator(batch.last)
        rows = []
        for req, text in zip(batch.reqs, texts.tolist(), strict=True):
            known = [drawn.token_id for drawn in self._drawn.ahead(req.rid, req.output_ids)]
            if not known:
                self._take(req, text)
                known = text
            rows.append((known + [FIRST] * LENGTH)[:LENGTH])
        return torch.tensor(rows)

    def proposals(self, batch: Batch, trees: DraftTrees | None = None) -> Proposals | None:
        rids, outputs = zip(*((req.rid, req.output_ids) for req in batch.reqs), strict=True)
        return self._drawn.proposals(rids, outputs, trees)

    def _with_the_targets_seeds(self, batch: Batch) -> Tensor:
        params = self._case.params
        seeds = torch.tensor([req.sampling_params.sampling_seed for req in batch.reqs])
        sharp = self._probs.pow(1 / params["temperature"])
        # Drops no token, but filtered rows are drawn all at once, and others in one race each.
        unfiltered = torch.full((len(seeds),), 1e-6)
        last, positions, tokens = batch.last, batch.seq_lens.cpu(), []
        for step in range(LENGTH):
            probs = (sharp / sharp.sum(1, keepdim=True))[last]
            draws = Draws(min_ps=unfiltered, seeds=seeds, positions=positions + step)
            last = sample_probs(probs, draws)
            tokens.append(last)
        return torch.stack(tokens, 1)

    def _with_its_own_generator(self, last: Tensor) -> Tensor:
        tokens = []
        for _ in range(LENGTH):
            last = torch.multinomial(self._probs[last], 1, generator=self._generator).squeeze(1)
            tokens.append(last)
        return torch.stack(tokens, 1)

    def _take(self, req: Request, text: list[int]) -> None:
        """Keep the tokens and their candidates, as the server does with a message."""
        previous = [req.output_ids[-1], *text[:-1]]
        candidates = [self._candidates[token] for token in previous]
        base_len = len(req.output_ids)
        drafted = Drafted(1, next(self._drafts), base_len, 0, text, candidates=candidates)
        self._drawn.take(req.rid, drafted)


def _candidates(probs: Tensor) -> Candidates:
    token_ids = probs.nonzero().flatten()
    return Candidates(token_ids.tolist(), probs[token_ids].tolist())
