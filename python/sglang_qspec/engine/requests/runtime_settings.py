"""Settings that an operator changes while the server runs, through `/set_internal_state`.

The endpoint carries only numbers: a mode is its index in `config.MODES`, a switch is 0 or 1. The
frontend checks values, so that a wrong one is an HTTP 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sglang_qspec.config import MAX_COMPLETIONS, MODES, QSpecConfig
from sglang_qspec.controls import SOURCES, Controls
from sglang_qspec.errors import RequestError

PREFIX = "qspec_"


@dataclass
class RuntimeSettings:
    """The present values. The worker owns them; its speculator reads and sets them.

    The first five apply from the next pass on, the others to requests that arrive afterwards.
    """

    mode: str
    """A pipeline, `queue`, or `auto`."""
    step_tokens: int
    """Maximum lookahead of step drafts, in tokens."""
    draft_token_num: int
    """Maximum number of tokens that a pass verifies for each request."""
    fixed_width: bool
    """Every pass has `draft_token_num` tokens a request."""
    enabled: bool = True
    """False: all requests are decoded plainly, and the sidecar drafts nothing."""
    completions: int = MAX_COMPLETIONS
    """Maximum number of completions of each waiting prompt."""
    source_queue: bool = True
    source_step: bool = True
    source_guess: bool = True
    source_prompt: bool = True
    source_output: bool = True

    @classmethod
    def of(cls, settings: QSpecConfig, draft_token_num: int, *, graphs: bool) -> RuntimeSettings:
        """The values at the start of a server. With CUDA `graphs` the width is fixed."""
        return cls(
            settings.mode,
            settings.step_tokens,
            draft_token_num,
            graphs or settings.width == "fixed",
            completions=settings.completions,
        )

    @property
    def sources(self) -> frozenset[str]:
        """Names of the draft sources in use."""
        return frozenset(source for source in SOURCES if getattr(self, f"source_{source}"))

    def grant(self, wanted: Controls) -> Controls:
        """The controls that a new request gets: what it wants, limited by the present values."""
        return replace(
            wanted,
            enabled=wanted.enabled and self.enabled,
            completions=min(wanted.completions, self.completions),
            sources=wanted.sources & self.sources,
        )

    def lookahead(self, pipeline: str, width: int) -> int:
        """Lookahead of step drafts in a pipeline whose passes are `width` wide, in tokens."""
        match pipeline:
            case "queue":
                return 0
            case "ahead":
                return self.step_tokens
        return min(self.step_tokens, width - 1)

    def set(self, name: str, value: float) -> None:
        """Set one value. `name` has its prefix; `check` has accepted `value`."""
        field = name.removeprefix(PREFIX)
        if field == "mode":
            self.mode = MODES[int(value)]
        else:
            setattr(self, field, type(getattr(self, field))(value))


NAMES = tuple(PREFIX + field.name for field in fields(RuntimeSettings))


def check(
    given: Mapping[str, Any], settings: QSpecConfig, draft_token_num: int, *, graphs: bool
) -> None:
    """Check the settings of QSPEC among `given`.

    `settings` and `draft_token_num` are those that the server was started with. With CUDA `graphs`
    no other `draft_token_num` is allowed. Raises RequestError that names the setting, the value and
    what is allowed.
    """
    switch = (0, 1)
    allowed: dict[str, tuple[int, int]] = {
        "mode": (0, len(MODES) - 1),
        "step_tokens": (1, 64),
        "draft_token_num": (draft_token_num if graphs else 1, draft_token_num),
        "fixed_width": (int(graphs), 1),
        "enabled": switch,
        "completions": (1, settings.completions),
        **{f"source_{source}": switch for source in SOURCES},
    }
    for name, value in given.items():
        if not name.startswith(PREFIX):
            continue
        bounds = allowed.get(name.removeprefix(PREFIX))
        if bounds is None:
            known = ", ".join(PREFIX + known for known in allowed)
            raise RequestError(f"{name} cannot be set; what can be is {known}")
        low, high = bounds
        if not (low <= value <= high and float(value).is_integer()):
            meaning = f" ({', '.join(MODES)})" if name == PREFIX + "mode" else ""
            raise RequestError(
                f"{name} is {value}, but must be a whole number from {low} to {high}{meaning}"
            )
