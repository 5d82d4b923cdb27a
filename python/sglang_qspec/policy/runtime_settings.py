"""Settings that an operator changes while the server runs, through `/set_internal_state`.

The endpoint takes only numbers: a mode is its index in `config.MODES`, a switch is 0 or 1. The
frontend checks the values and answers a wrong one with HTTP 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sglang_qspec.config import MAX_COMPLETIONS, MODES, QSpecConfig
from sglang_qspec.controls import Controls
from sglang_qspec.draft_source import SOURCES
from sglang_qspec.errors import RequestError

PREFIX = "qspec_"
SOURCE = "source_"
"""Prefix of the settings that switch a draft source on or off."""


@dataclass
class RuntimeSettings:
    """The present values. The worker owns them; its speculator reads and changes them.

    A change of the first seven applies from the next pass on, a change of the others to requests
    that arrive later.
    """

    mode: str
    """One of `config.MODES`."""
    step_tokens: int
    """Maximum lookahead of step drafts, in tokens."""
    draft_token_num: int
    """Maximum number of tokens that a pass verifies for each request."""
    fixed_width: bool
    """True: every pass has `draft_token_num` tokens for each request, or the next smaller number
    that has CUDA graphs for the batch. A ragged pass leaves out the padding."""
    ragged: bool = False
    """True: a pass verifies the likeliest tokens of all requests, without padding."""
    prefill_drafts: bool = False
    """True: the pass over a prompt also verifies drafts of the answer, if that pays."""
    enabled: bool = True
    """False: all requests are decoded plainly, and the sidecar drafts nothing."""
    completions: int = MAX_COMPLETIONS
    """Maximum number of completions of each waiting prompt."""
    sources: frozenset[str] = frozenset(SOURCES)
    """Names of the draft sources that requests may use; each has a setting `source_NAME`."""

    @classmethod
    def of(
        cls, settings: QSpecConfig, draft_token_num: int, *, ragged: bool = False
    ) -> RuntimeSettings:
        """The values at the start of a server."""
        return cls(
            settings.mode,
            settings.step_tokens,
            draft_token_num,
            settings.width == "fixed",
            ragged,
            settings.prefill_drafts == "on",
            completions=settings.completions,
        )

    def describe(self) -> dict[str, object]:
        """The value of each setting by its name, for /server_info."""
        shown = {name: value for name, value in vars(self).items() if name != "sources"}
        return shown | {SOURCE + source: source in self.sources for source in SOURCES}

    def grant(self, wanted: Controls) -> Controls:
        """The controls of a new request: the `wanted` ones, limited by the present values."""
        return replace(
            wanted,
            enabled=wanted.enabled and self.enabled,
            completions=min(wanted.completions, self.completions),
            sources=wanted.sources & self.sources,
        )

    def lookahead(self, pipeline: str, width: int) -> int:
        """Lookahead of step drafts, in tokens, in a pipeline with passes of `width` tokens."""
        match pipeline:
            case "queue":
                return 0
            case "ahead":
                return self.step_tokens
        return min(self.step_tokens, width - 1)

    def set(self, name: str, value: float) -> None:
        """Set one value. `name` has the prefix `qspec_`; `check` has accepted `value`."""
        field = name.removeprefix(PREFIX)
        if field == "mode":
            self.mode = MODES[int(value)]
        elif field.startswith(SOURCE):
            self.sources = self.sources - {field.removeprefix(SOURCE)}
            if value:
                self.sources |= {field.removeprefix(SOURCE)}
        else:
            setattr(self, field, type(getattr(self, field))(value))


NAMES = tuple(
    PREFIX + name
    for name in (
        *(field.name for field in fields(RuntimeSettings) if field.name != "sources"),
        *(SOURCE + source for source in SOURCES),
    )
)
"""Names of all settings in `/set_internal_state`."""


def check(
    given: Mapping[str, Any],
    settings: QSpecConfig,
    draft_token_num: int,
    *,
    ragged: tuple[int, int] = (0, 0),
    prefill_drafts: bool = True,
) -> None:
    """Check the settings of QSPEC among `given`.

    `settings` and `draft_token_num` are the values at the start of the server; they bound the new
    values. `ragged` has the smallest and the largest value of the setting `ragged`, and
    `prefill_drafts` says whether that setting may be 1. Raises RequestError for an unknown setting
    or a value that is not allowed.
    """
    switch = (0, 1)
    allowed: dict[str, tuple[int, int]] = {
        "mode": (0, len(MODES) - 1),
        "step_tokens": (1, 64),
        "draft_token_num": (1, draft_token_num),
        "fixed_width": switch,
        "ragged": ragged,
        "prefill_drafts": (0, int(prefill_drafts)),
        "enabled": switch,
        "completions": (1, settings.completions),
        **{SOURCE + source: switch for source in SOURCES},
    }
    for name, value in given.items():
        if not name.startswith(PREFIX) or ":" in name:  # `sidecar.endpoints` checks the latter
            continue
        bounds = allowed.get(name.removeprefix(PREFIX))
        if bounds is None:
            known = ", ".join(PREFIX + known for known in allowed)
            raise RequestError(f"{name} is not a runtime setting; allowed are {known}")
        low, high = bounds
        if not (low <= value <= high and float(value).is_integer()):
            meaning = f" ({', '.join(MODES)})" if name == PREFIX + "mode" else ""
            raise RequestError(
                f"{name} is {value}, but must be a whole number from {low} to {high}{meaning}"
            )
