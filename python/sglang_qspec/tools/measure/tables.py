"""Times and agreement of a target and a draft model: what is measured, and predictions read.

`PairTimes` are for the formulas of `tools.theory`. `Tables` are for the simulation of `tools.plan`,
as a JSON file (schema: docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy.curve import Curve

VERSION: Final = 1
"""Version of the schema."""

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Agreed = Annotated[str, msgspec.Meta(pattern="^[01]+$")]
"""One character for each output token of an answer: 1 if the draft model chose the token too."""
Agreement = (
    Annotated[float, msgspec.Meta(ge=0, le=1)] | Annotated[list[Agreed], msgspec.Meta(min_length=1)]
)
"""A probability, or measured answers."""


class PassSeconds:
    """V(b, w): seconds of a target pass, interpolated between measured ones."""

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        """`measured` are seconds by number of requests and width."""
        self.measured = measured
        self._by_width = {
            width: Curve.through((b, each) for (b, w), each in measured.items() if w == width)
            for width in sorted({width for _, width in measured})
        }
        self._at: dict[int, Curve] = {}
        """Seconds by width, by number of requests."""

    @property
    def widest(self) -> int:
        """Largest measured width."""
        return max(self._by_width)

    @property
    def most_requests(self) -> int:
        """Largest measured number of requests."""
        return max(requests for requests, _ in self.measured)

    def widths(self, requests: int) -> list[int]:
        """Measured widths of passes of `requests` with draft tokens."""
        return sorted(width for b, width in self.measured if b == requests and width > 1)

    def __call__(self, requests: int, width: float) -> float:
        """Seconds of a pass: interpolated over the requests, then over the average width."""
        if requests not in self._at:
            points = ((each, curve(requests)) for each, curve in self._by_width.items())
            self._at[requests] = Curve.through(points)
        return self._at[requests](width)


class Slowdown(NamedTuple):
    """Time while target and draft model run at once, over the time while the other one is idle."""

    verify: float = 1.0
    """Of the target's passes."""
    draft: float = 1.0
    """Of draft steps."""


APART = Slowdown()
"""The models do not slow each other down."""


@dataclass(frozen=True)
class PairTimes:
    """Times of a target and a draft model, by which `theory.prediction` predicts the throughput."""

    plain: Curve
    """Seconds of a decode pass without a draft model, on all CPUs of both, by the number of
    requests."""
    passes: PassSeconds
    """Seconds of passes beside a draft model."""
    step: Curve
    """Seconds of a draft step by the number of requests."""
    overlaps: bool = True
    """Whether the draft model can draft while the target verifies; otherwise they take turns."""
    slowdown: Slowdown = APART
    """What both cost each other while they run at once."""


class Verify(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of a target pass over `width` tokens of each of `requests`, host work included."""

    requests: Count
    width: Count
    seconds: Seconds


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of a draft step, which extends `rows` drafts by one token."""

    rows: Annotated[float, msgspec.Meta(gt=0)]
    seconds: Seconds


class HostGap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time in which a target with drafts waits for the host between two passes of `requests`."""

    requests: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of a pass over prompts: `base`, and `token` for each prompt token, at least `least`."""

    base: Annotated[float, msgspec.Meta(ge=0)]
    token: Annotated[float, msgspec.Meta(ge=0)]
    least: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def seconds(self, tokens: int) -> float:
        """Time of a pass over this number of prompt tokens."""
        return max(self.least, self.base + self.token * tokens)


class Gpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPUs, or other units with a price, of one target and of one sidecar."""

    target: Count = 1
    sidecar: Count = 1


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """What the simulation knows of a machine and a pair of models."""

    version: Literal[1]
    source: Literal["measured", "computed"]
    """Whether the times were measured, or computed from data sheets."""
    machine: str
    target: str
    draft: str
    on_gpu: bool
    """Whether passes run in CUDA graphs of a few widths; otherwise they are ragged."""
    verify: Annotated[list[Verify], msgspec.Meta(min_length=1)]
    prefill: Prefill
    draft_steps: Annotated[list[Draft], msgspec.Meta(min_length=1)]
    draft_prefill_token: Annotated[float, msgspec.Meta(ge=0)]
    """Time that a prompt token adds to the pass of the draft model that reads it."""
    agreement: Annotated[dict[Literal["step", "queue"], Agreement], msgspec.Meta(min_length=1)]
    """By source; a missing source takes the agreement of the other one."""
    again: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Probability that a text that left its queue draft matches it again at a pass."""
    slowdown: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    """Time of a target pass while the sidecar drafts, over its time alone."""
    gap: list[HostGap] = []
    """What a server with speculation adds to each pass, plain ones too, because the host reads the
    tokens of the last pass first. Empty if the times of `verify` include the wait."""
    gpus: Gpus = Gpus()
    conditions: dict[str, str] = {}
    """How the tables came about: dtype, prompts, data-sheet numbers and the like."""

    def __post_init__(self) -> None:
        cells = {(row.requests, row.width) for row in self.verify}
        missing = {(b, w) for b, _ in cells for _, w in cells} - cells
        if missing:
            b, w = min(missing)
            raise ValueError(
                f"`verify` has no row with {b} requests and width {w}, but must have each number "
                "of requests with each width"
            )

    @cached_property
    def passes(self) -> PassSeconds:
        """The times of target passes."""
        return PassSeconds({(row.requests, row.width): row.seconds for row in self.verify})

    @cached_property
    def _step(self) -> Curve:
        return Curve.through((row.rows, row.seconds) for row in self.draft_steps)

    @cached_property
    def _gap(self) -> Curve:
        return Curve.through([(row.requests, row.seconds) for row in self.gap] or [(1, 0.0)])

    def gap_seconds(self, requests: int) -> float:
        """Time in which the target waits for the host between two passes of `requests`."""
        return self._gap(requests)

    def step_seconds(self, rows: int) -> float:
        """Time of a draft step over this number of drafts."""
        return self._step(rows)

    def agreement_of(self, source: Literal["step", "queue"]) -> Agreement:
        """The agreement of a source."""
        found = self.agreement.get(source)
        return next(iter(self.agreement.values())) if found is None else found


def load(path: Path) -> Tables:
    """Read tables. Raises ConfigError that names the file, the field and what is allowed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tables)
    except OSError as error:
        raise ConfigError(f"--tables is {path}, which cannot be read: {error}") from None
    except ValueError as error:  # msgspec's errors too
        raise ConfigError(f"--tables is {path}, but the file is not allowed: {error}") from None


def save(tables: Tables, path: Path) -> None:
    """Write tables. Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(tables), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output is {path}, but it cannot be written: {error}") from None
