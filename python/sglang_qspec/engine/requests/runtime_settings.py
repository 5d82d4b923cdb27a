"""Settings that may be changed while the server runs, through SGLang's `/set_internal_state`.

That endpoint carries numbers only, so a mode is named by its place among `config.MODES` and a
switch is 0 or 1. Values are checked where the request comes in, while an error still is a 400.
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
    """The values in force. Owned by the worker; its speculator reads and turns them.

    The first five count from the next pass on, the others for requests that come from then on.
    """

    mode: str
    step_tokens: int
    draft_token_num: int
    """Tokens of a verify pass for each request, at most."""
    fixed_width: bool
    enabled: bool = True
    """False: decode all requests plainly, and have nothing drafted."""
    completions: int = MAX_COMPLETIONS
    """Of each waiting prompt, at most."""
    source_queue: bool = True
    source_step: bool = True
    source_guess: bool = True
    source_prompt: bool = True
    source_output: bool = True

    @classmethod
    def of(cls, settings: QSpecConfig, draft_token_num: int, *, graphs: bool) -> RuntimeSettings:
        """As the server was started; with captured `graphs` there is one width."""
        return cls(
            settings.mode,
            settings.step_tokens,
            draft_token_num,
            graphs or settings.width == "fixed",
            completions=settings.completions,
        )

    @property
    def sources(self) -> frozenset[str]:
        """Those that are used."""
        return frozenset(source for source in SOURCES if getattr(self, f"source_{source}"))

    def grant(self, wanted: Controls) -> Controls:
        """What a request that comes now gets of what it wants."""
        return replace(
            wanted,
            enabled=wanted.enabled and self.enabled,
            completions=min(wanted.completions, self.completions),
            sources=wanted.sources & self.sources,
        )

    def lookahead(self, pipeline: str, width: int) -> int:
        """How far step drafts are to run ahead of what is committed, in tokens.

        A pass verifies at most `width` tokens of a request.
        """
        match pipeline:
            case "queue":
                return 0
            case "ahead":
                return self.step_tokens
        return min(self.step_tokens, width - 1)

    def set(self, name: str, value: float) -> None:
        """Turn one knob, named with its prefix, to a value that `check` has let through."""
        field = name.removeprefix(PREFIX)
        if field == "mode":
            self.mode = MODES[int(value)]
        else:
            setattr(self, field, type(getattr(self, field))(value))


NAMES = tuple(PREFIX + field.name for field in fields(RuntimeSettings))


def check(
    given: Mapping[str, Any], settings: QSpecConfig, draft_token_num: int, *, graphs: bool
) -> None:
    """Check those of `given` that are ours; `settings` and `draft_token_num` are the server's own.

    With captured `graphs` there is no other `draft_token_num`.

    Raises RequestError that names the knob, the value, and what is allowed.
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
