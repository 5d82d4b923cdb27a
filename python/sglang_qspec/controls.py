"""Per-request settings, which lower the server's settings or switch speculation off.

They are keys of the sampling parameters' `custom_params` with the prefix `qspec_`. The keys are
flat, because SGLang allows no nested objects there. Most are named after a setting in `config`;
`draft_token_num` is named after SGLang's `--speculative-num-draft-tokens`. `guess` reads the keys
of guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_qspec.config import MAX_DRAFT_TOKENS, QSpecConfig
from sglang_qspec.draft_source import SOURCES
from sglang_qspec.errors import RequestError, shown
from sglang_qspec.guess_tags import GUESS_KEYS

PREFIX = "qspec_"


@dataclass(frozen=True)
class Controls:
    """Settings of one request."""

    enabled: bool
    """Whether to speculate; False decodes the request plainly."""
    sources: frozenset[str]
    """Draft sources that the request uses, a subset of SOURCES."""
    completions: int
    """Number of completions to draft while the request waits."""
    draft_token_num: int
    """Maximum number of tokens that a pass verifies, including the last committed token; 1 means no
    drafts."""
    temperature: float
    """Sampling temperature of the completions."""
    top_p: float
    """Cumulative probability of the most likely tokens that completions are sampled from."""
    greedy_first: bool
    """Whether the first completion is greedy."""
    max_completion_tokens: int
    """Maximum length of a completion, in tokens."""
    return_provenance: bool
    """Whether the answer labels each output token with its draft source, or `target`."""
    return_trace: bool
    """Whether the answer describes each pass of the target: the tree, the match and the time."""


def of_server(settings: QSpecConfig, draft_token_num: int = MAX_DRAFT_TOKENS) -> Controls:
    """Controls of a request without `custom_params`; `draft_token_num` is the server's setting."""
    return Controls(
        enabled=True,
        sources=frozenset(SOURCES),
        completions=settings.completions,
        draft_token_num=draft_token_num,
        temperature=settings.temperature,
        top_p=settings.top_p,
        greedy_first=not settings.disable_greedy_first,
        max_completion_tokens=settings.max_completion_tokens,
        return_provenance=settings.return_provenance,
        return_trace=False,
    )


def as_object(custom_params: object) -> dict[str, Any]:
    """`custom_params`, or an empty object for None. Raises RequestError for other values."""
    if custom_params is None:
        return {}
    if not isinstance(custom_params, dict):
        raise RequestError(f"custom_params is {shown(custom_params)}, but must be an object")
    return custom_params


def read(
    custom_params: Mapping[str, Any] | None,
    settings: QSpecConfig,
    draft_token_num: int = MAX_DRAFT_TOKENS,
) -> Controls:
    """Controls of a request with these `custom_params`; keys without the prefix are ignored.

    Raises RequestError for an unknown key with the prefix, and for a value that is not allowed.
    """
    most = of_server(settings, draft_token_num)
    given = {
        key: value
        for key, value in (custom_params or {}).items()
        if str(key).startswith(PREFIX) and key not in GUESS_KEYS
    }
    if not given:
        return most
    fields: dict[str, Callable[[object], Any]] = {
        "enabled": _switch,
        "sources": _sources,
        "completions": _whole_up_to(most.completions),
        "draft_token_num": _whole_up_to(most.draft_token_num),
        "temperature": _number_up_to(most.temperature),
        "top_p": _number_up_to(most.top_p),
        "greedy_first": _switch,
        "max_completion_tokens": _whole_up_to(most.max_completion_tokens),
        "return_provenance": _switch,
        "return_trace": _switch,
    }
    values = dict(vars(most))
    for key, value in given.items():
        name = key.removeprefix(PREFIX)
        if name not in fields:
            known = ", ".join([*(PREFIX + field for field in fields), *GUESS_KEYS])
            raise RequestError(f"{key} in custom_params is not known; allowed are {known}")
        try:
            values[name] = fields[name](value)
        except ValueError as allowed:
            raise RequestError(
                f"{key} in custom_params is {shown(value)}, but must be {allowed}"
            ) from None
    return Controls(**values)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _whole_up_to(high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        # isinstance would accept a bool as an int.
        if type(value) is not int or not 1 <= value <= high:
            raise ValueError(f"a whole number from 1 to {high}, the server's setting")
        return value

    return check


def _number_up_to(high: float) -> Callable[[object], float]:
    def check(value: object) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value <= high  # also false for NaN
        ):
            raise ValueError(f"a number from 0 to {high:g}, the server's setting")
        return float(value)

    return check


def _sources(value: object) -> frozenset[str]:
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(item, str) and item in SOURCES for item in value)
    ):
        raise ValueError(f"a list of one or more of {', '.join(SOURCES)}")
    return frozenset(value)
