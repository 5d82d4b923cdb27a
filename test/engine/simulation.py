"""Runs passes of a scripted target on a simulated clock; the code for drafts is a server's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.decide.proposer import Proposer
from sglang_qspec.engine.passes.launch import decode
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import Link
from sglang_qspec.policy import PipelinePlan
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTree, TrieLimits, TrieStore

VOCAB = 2000
PROMPT = [5, 6, 7]
SAMPLING = SimpleNamespace(
    has_custom_logit_processor=False,
    has_watermark_candidates=False,
    need_min_p_sampling=False,
    acc_additive_penalties=None,
    acc_scaling_penalties=None,
)


@dataclass
class Clock:
    """Seconds that advance only when a test sets `now`."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Simulation:
    """Serves requests with given answers, all at the same time."""

    cost: Callable[[int, float], float]
    """Seconds that a pass takes, by number of requests and average width."""
    width: int = 16
    ranks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Ranks of requests in the queue; (0, 0) for the others."""
    ragged: bool = True
    chains: bool = False
    link: Link | None = None
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        config = QSpecConfig(max_request_tokens=4096, max_total_tokens=1 << 20)
        tries = TrieStore(TrieLimits(VOCAB, 4096, max_total_tokens=1 << 20))
        opened = Opened() if self.link is None else Opened((self.link,))
        self.active = Speculator(config, VOCAB, tries, opened, self.clock)
        runtime_settings = RuntimeSettings.of(config, self.width, ragged=self.ragged)
        self.accounting = PassAccounting(self.active, runtime_settings, self.clock)
        self.proposer = Proposer(
            self.active,
            runtime_settings,
            self.accounting.times,
            chains=self.chains,
            clock=self.clock,
        )
        self.longest = 0.0
        """The longest pass, as a multiple of a pass without drafts over its requests."""
        self.rows = 0
        """Number of tokens in the inputs of all passes."""
        self.branching = 0
        """Number of trees, over all passes, with a node that has several children."""
        self.ended: dict[str, float] = {}
        """Seconds from the start of its batch to the end of each request."""

    def serve(
        self,
        answers: Mapping[str, Sequence[int]],
        custom_params: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> float:
        """Serve each answer to its end under its rid. Returns the simulated seconds."""
        began, asked = self.clock.now, custom_params or {}
        outputs = {rid: [answer[0]] for rid, answer in answers.items()}
        for rid, answer in answers.items():
            self.active.enqueue(
                rid,
                prompt_ids=PROMPT,
                output_ids=[],
                max_new_tokens=len(answer),
                stop_token_ids=[],
                custom_params=asked.get(rid),
                rank=self.ranks.get(rid, (0, 0)),
            )
            self.active.admit(rid)
        self.accounting.interrupt()
        while running := [rid for rid in answers if len(outputs[rid]) < len(answers[rid])]:
            self._pass(running, outputs, answers)
            for rid in running:
                if len(outputs[rid]) >= len(answers[rid]):
                    self.active.end(rid, len(outputs[rid]))
                    self.ended[rid] = self.clock.now - began
        self.active.check_integrity()
        return self.clock.now - began

    def _pass(
        self,
        rids: list[str],
        outputs: dict[str, list[int]],
        answers: Mapping[str, Sequence[int]],
    ) -> None:
        self.active.poll()
        # All that a proposer reads of SGLang's batch.
        reqs = [
            SimpleNamespace(rid=rid, output_ids=outputs[rid], multimodal_inputs=None)
            for rid in rids
        ]
        batch: Any = SimpleNamespace(reqs=reqs, sampling_info=SAMPLING)
        plan = PipelinePlan("ahead", self.width)
        self.accounting.begin()
        proposal = decode.propose(self.proposer, self.active, batch, plan)
        trees = proposal.trees
        self.rows += trees.rows
        parents = [tree.parents[1:] for tree in map(trees.__getitem__, range(len(trees)))]
        self.branching += sum(len(set(row)) < len(row) for row in parents)
        seconds = self.cost(len(trees), trees.rows / len(trees))
        self.longest = max(self.longest, seconds / self.cost(len(trees), 1))
        self.clock.now += seconds
        accepted, bonus_ids = [], []
        for row, rid in enumerate(rids):
            left = answers[rid][len(outputs[rid]) :]
            nodes = walk(trees[row], left[:-1])
            accepted.append(nodes)
            bonus_ids.append(left[len(nodes)])
            outputs[rid] += left[: len(nodes) + 1]
        self.accounting.record(rids, plan.pipeline, proposal, accepted, bonus_ids)


def walk(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """The path of nodes that match `text`, as far as the tree has it."""
    nodes: list[int] = []
    at = 0
    for token in text:
        children = [
            node
            for node in range(1, len(tree))
            if tree.parents[node] == at and tree.token_ids[node] == token
        ]
        if not children:
            break
        at = children[0]
        nodes.append(at)
    return nodes
