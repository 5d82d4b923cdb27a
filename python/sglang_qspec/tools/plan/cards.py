"""Tables computed from data sheets by the roofline model.

docs/plan.md has the formulas, and names the data sheets.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.measure.tables import VERSION, Draft, Gpus, Prefill, Tables, Verify

BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.6
"""Assumed shares of a data sheet's peaks that a pass reaches."""
HOST_S = 0.0005
"""Assumed host work of a pass, in seconds."""
CONTEXT = 1024
"""Default number of tokens whose KV a pass reads for each request."""
ROOM = 1.2
"""Memory of a model with its KV, over its weights, that decides how many cards hold a target."""
MEMORY_SHARE = 0.9
"""Assumed share of the memory for weights and KV."""
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (1, 2, 4, 8)
ROWS = (1, 8, 64, 256, 1024)


class Card(NamedTuple):
    """A GPU's data sheet."""

    bandwidth: float
    """Memory bandwidth in bytes per second."""
    flops: float
    """Dense bfloat16 operations per second."""
    memory: float
    """Bytes."""


class Model(NamedTuple):
    """Sizes of a model in bfloat16."""

    parameters: float
    kv_bytes: int
    """KV bytes of a token: 2 (K and V) x layers x KV heads x head size x 2 bytes."""


CARDS = {
    "H100": Card(3.35e12, 989e12, 80e9),
    "H200": Card(4.8e12, 989e12, 141e9),
    "B200": Card(8.0e12, 2250e12, 180e9),
    "L40S": Card(0.864e12, 362e12, 48e9),
    "A10": Card(0.6e12, 125e12, 24e9),
}
"""By name; H100, H200 and B200 are those with SXM sockets."""
MODELS = {
    "70B": Model(70.6e9, 2 * 80 * 8 * 128 * 2),
    "8B": Model(8.03e9, 2 * 32 * 8 * 128 * 2),
    "3B": Model(3.21e9, 2 * 28 * 8 * 128 * 2),
    "1B": Model(1.24e9, 2 * 16 * 8 * 64 * 2),
}
"""The shapes of Llama 3.1 (70B, 8B) and Llama 3.2 (3B, 1B)."""
ALLOWED = f"CARD:TARGET:DRAFT with a card of {', '.join(CARDS)} and models of {', '.join(MODELS)}"


def pass_seconds(
    card: Card, cards: int, model: Model, requests: float, rows: float, context: float = CONTEXT
) -> float:
    """Roofline time of a pass over `rows` tokens of `requests` on `cards`, host work included.

    The longer of reading weights and KV, `context` tokens a request, and of the matrix products.
    """
    read = 2 * model.parameters + requests * context * model.kv_bytes
    reading = read / (BANDWIDTH_SHARE * card.bandwidth)
    computing = 2 * model.parameters * rows / (FLOPS_SHARE * card.flops)
    return HOST_S + max(reading, computing) / cards


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


def computed(name: str, alpha: float, context: float = CONTEXT) -> Tables:
    """The tables of CARD:TARGET:DRAFT. `alpha` is the agreement of the models.

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
    return Tables(
        version=VERSION,
        source="computed",
        machine=f"{parts[0]} (data sheet)",
        target=parts[1],
        draft=parts[2],
        on_gpu=True,
        verify=[
            Verify(b, w, pass_seconds(card, on, target, b, b * w, context))
            for b in REQUESTS
            for w in WIDTHS
            if b <= most
        ],
        prefill=Prefill(HOST_S, token, pass_seconds(card, on, target, 0, 0)),
        draft_steps=[Draft(n, pass_seconds(card, beside, draft, n, n, context)) for n in ROWS],
        draft_prefill_token=2 * draft.parameters / (FLOPS_SHARE * card.flops) / beside,
        agreement={"step": alpha},
        gpus=Gpus(on, beside),
        conditions={"dtype": "bfloat16", "context": f"{context:g} tokens", "alpha": f"{alpha:g}"},
    )
