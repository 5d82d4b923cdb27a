"""Tables computed from data sheets by the roofline model.

docs/plan.md has the formulas, and names the data sheets.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.measure.tables import VERSION, Draft, Gpus, HostGap, Prefill, Tables, Verify

BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.6
"""Assumed shares of a data sheet's peaks that a pass reaches."""
CONTEXT = 1024
"""Default number of tokens whose KV a pass reads for each request."""
ROOM = 1.2
"""Memory of a model with its KV, over its weights, that decides how many cards hold a target."""
MEMORY_SHARE = 0.9
"""Assumed share of the memory for weights and KV."""
ASSUMED_ALPHA = 0.7
"""Assumed agreement of target and draft model where none is given."""
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (1, 2, 4, 8)
ROWS = (1, 8, 64, 256, 1024)


class Terms(NamedTuple):
    """Times in seconds that no data sheet has, for a server with drafts and its sidecar."""

    host_gap: tuple[tuple[int, float], ...]
    """(requests, seconds) in which the target waits for the host between two passes."""
    step_launch: float
    """What a draft step takes beside its reading and computing: launches, sampling, transfers."""
    cascade: float
    """What fa3's attention over a tree adds to a pass in each layer: it computes the prefix and the
    tree apart, by cascade, and merges them."""


TODAY = Terms(
    host_gap=((1, 1.0e-3), (8, 1.3e-3), (32, 1.9e-3), (64, 2.6e-3), (128, 4.0e-3)),
    step_launch=1.2e-3,
    cascade=10e-6,
)
"""The present code, estimated. docs/plan.md says from what, and which figures of an H100 there are.
Passes without speculation need none of the terms."""


class Card(NamedTuple):
    """A GPU's data sheet."""

    bandwidth: float
    """Memory bandwidth in bytes per second."""
    flops: float
    """Dense bfloat16 operations per second."""
    memory: float
    """Bytes."""
    cascades: bool = False
    """Whether SGLang's default attention is fa3, which verifies trees by cascade."""


class Model(NamedTuple):
    """Sizes of a model in bfloat16."""

    parameters: float
    layers: int
    kv_width: int
    """Size of a token's K or V in a layer: KV heads x head size."""

    @property
    def kv_bytes(self) -> int:
        """KV bytes of a token: K and V of each layer, 2 bytes for a value."""
        return 2 * self.layers * self.kv_width * 2


CARDS = {
    "H100": Card(3.35e12, 989e12, 80e9, cascades=True),
    "H200": Card(4.8e12, 989e12, 141e9, cascades=True),
    "B200": Card(8.0e12, 2250e12, 180e9),
    "L40S": Card(0.864e12, 362e12, 48e9),
    "A10": Card(0.6e12, 125e12, 24e9),
}
"""By name; H100, H200 and B200 are those with SXM sockets."""
MODELS = {
    "70B": Model(70.6e9, 80, 8 * 128),
    "8B": Model(8.03e9, 32, 8 * 128),
    "3B": Model(3.21e9, 28, 8 * 128),
    "1B": Model(1.24e9, 16, 8 * 64),
    "0.6B": Model(0.596e9, 28, 8 * 128),
}
"""The shapes of Llama 3.1 (70B, 8B), Llama 3.2 (3B, 1B) and Qwen3 (0.6B)."""
ALLOWED = f"CARD:TARGET:DRAFT with a card of {', '.join(CARDS)} and models of {', '.join(MODELS)}"


def pass_seconds(
    card: Card, cards: int, model: Model, requests: float, rows: float, context: float = CONTEXT
) -> float:
    """Roofline time of a pass over `rows` tokens of `requests` on `cards`.

    The longer of reading weights and KV, `context` tokens a request, and of the matrix products.
    """
    read = 2 * model.parameters + requests * context * model.kv_bytes
    reading = read / (BANDWIDTH_SHARE * card.bandwidth)
    computing = 2 * model.parameters * rows / (FLOPS_SHARE * card.flops)
    return max(reading, computing) / cards


def most_requests(card: Card, cards: int, model: Model, context: float) -> int:
    """The number of requests of `context` tokens whose KV fits in memory beside the weights."""
    free = MEMORY_SHARE * cards * card.memory - 2 * model.parameters
    return max(0, int(free / (context * model.kv_bytes)))


def cards_for(card: Card, model: Model, context: float = CONTEXT) -> int:
    """The number of cards that hold the model and the KV of one request: a power of two."""
    count = 1
    while count * card.memory < ROOM * 2 * model.parameters or not most_requests(
        card, count, model, context
    ):
        count *= 2
    return count


def computed(
    name: str, alpha: float | None = None, context: float = CONTEXT, terms: Terms = TODAY
) -> Tables:
    """The tables of CARD:TARGET:DRAFT.

    `alpha` is the agreement of the models; without one, ASSUMED_ALPHA.

    A request has `context` tokens. The tables have as many requests as the memory holds.

    Raises ConfigError with the allowed names.
    """
    parts = name.split(":")
    if len(parts) != 3 or parts[0] not in CARDS or not set(parts[1:]) <= MODELS.keys():
        raise ConfigError(f"--tables is {name!r}, but must be a JSON file, or {ALLOWED}")
    card, target, draft = CARDS[parts[0]], MODELS[parts[1]], MODELS[parts[2]]
    on, beside = cards_for(card, target, context), cards_for(card, draft, context)
    most = most_requests(card, on, target, context)
    token = 2 * target.parameters / (FLOPS_SHARE * card.flops) / on
    tree = target.layers * terms.cascade if card.cascades else 0.0
    return Tables(
        version=VERSION,
        source="computed",
        machine=f"{parts[0]} (data sheet)",
        target=parts[1],
        draft=parts[2],
        on_gpu=True,
        verify=[
            Verify(b, w, pass_seconds(card, on, target, b, b * w, context) + (w > 1) * tree)
            for b in REQUESTS
            for w in WIDTHS
            if b <= most
        ],
        prefill=Prefill(0.0, token, pass_seconds(card, on, target, 0, 0)),
        draft_steps=[
            Draft(n, terms.step_launch + pass_seconds(card, beside, draft, n, n, context))
            for n in ROWS
        ],
        draft_prefill_token=2 * draft.parameters / (FLOPS_SHARE * card.flops) / beside,
        agreement={"step": ASSUMED_ALPHA if alpha is None else alpha},
        gap=[HostGap(*each) for each in terms.host_gap],
        gpus=Gpus(on, beside),
        conditions={
            "dtype": "bfloat16",
            "context": f"{context:g} tokens",
            "alpha": f"{ASSUMED_ALPHA:g}, assumed" if alpha is None else f"{alpha:g}",
        },
    )
