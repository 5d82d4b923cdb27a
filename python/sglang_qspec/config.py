"""Every setting of QSPEC: its default, what is allowed, its flag and its environment variable.

The server's own flags are used where SGLang has one (`--speculative-draft-model-path`,
`--speculative-draft-model-quantization`, `--speculative-num-draft-tokens`); the rest live here.
A field `completions` is the flag `--speculative-qspec-completions` and the variable
`SGLANG_QSPEC_COMPLETIONS`. SGLang starts its processes anew and a plugin cannot add fields to its
arguments, so the environment is what carries the settings to all of them; flags are written to it.

This is the one file that reads the environment.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_qspec.errors import ConfigError

FLAG_PREFIX = "--speculative-qspec-"
ENV_PREFIX = "SGLANG_QSPEC_"
MAX_COMPLETIONS = 64
MAX_DRAFT_TOKENS = 64
"""Tokens of a verify pass for one request, the committed one included."""
MAX_SERVER_TOKENS = 8 << 20
"""Default of the tokens of texts, and of the tokens of drafts, that a sidecar keeps for one server.
A text takes eight bytes a token and a draft four, so that a server takes about 100 MiB."""
PIPELINES = ("sequential", "halves", "ahead")
"""How the drafting of steps and their verification can interleave."""
MODES = ("queue", *PIPELINES, "auto")

Parser = Callable[[str], Any]
"""Reads a setting from text; raises ValueError with what is allowed."""


def _whole(low: int, high: int) -> Parser:
    def parse(text: str) -> int:
        allowed = f"a whole number from {low} to {high}"
        try:
            value = int(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not low <= value <= high:
            raise ValueError(allowed)
        return value

    return parse


def _number(low: float, high: float) -> Parser:
    def parse(text: str) -> float:
        allowed = f"a number from {low:g} to {high:g}"
        try:
            value = float(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not low <= value <= high:
            raise ValueError(allowed)
        return value

    return parse


def _switch(text: str) -> bool:
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off" | "":
            return False
    raise ValueError("true or false")


def _one_of(*choices: str) -> Parser:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text

    return parse


def _endpoint(text: str) -> str:
    if text and not text.startswith(("ipc://", "tcp://")):
        raise ValueError("ipc://PATH or tcp://HOST:PORT")
    return text


def _device(text: str) -> str:
    kind, _, index = text.partition(":")
    if text and (kind not in ("cpu", "cuda") or (index and not index.isdigit())):
        raise ValueError("cpu, cuda or cuda:N")
    return text


def _cores(text: str) -> str:
    parse_cores(text)
    return text


def parse_cores(text: str) -> frozenset[int]:
    """The processor numbers in a list such as `0,2-5`; empty for an empty text.

    Raises ValueError with what is allowed.
    """
    cores: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(last or first) < int(first):
            raise ValueError("a list of processor numbers such as 0,2-5")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _text(text: str) -> str:
    return text


def _setting(default: Any, parse: Parser, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "help": help})


@dataclass(frozen=True)
class QSpecConfig:
    """All settings of one server, checked. Frozen: a change needs a restart."""

    completions: int = _setting(
        8,
        _whole(1, MAX_COMPLETIONS),
        "completions drafted of each waiting prompt: one greedy, the rest sampled",
    )
    temperature: float = _setting(
        0.6, _number(0.0, 2.0), "sampling temperature of all completions but the greedy one"
    )
    top_p: float = _setting(
        1.0,
        _number(0.0, 1.0),
        "sampled completions keep to the likeliest tokens that have this much of the probability "
        "together; 1 means all",
    )
    disable_greedy_first: bool = _setting(
        False, _switch, "sample all completions, the first one too"
    )
    on_admission: str = _setting(
        "defer",
        _one_of("defer", "stop", "continue"),
        "what the sidecar does about a request once it is served: defer its drafts to those of "
        "waiting requests, stop (also all that the mode would do), or continue",
    )
    mode: str = _setting(
        "auto",
        _one_of(*MODES),
        "what the sidecar drafts for: waiting requests alone (queue), or served ones too and first "
        "of all: between two passes of the target (sequential), for one half of them while the "
        "target verifies the other (halves), ahead of what it verifies (ahead), or what of these "
        "is fastest by the times that are measured (auto)",
    )
    step_tokens: int = _setting(
        16,
        _whole(1, 64),
        "how far drafts for a served request run ahead of what is committed, in tokens; in "
        "sequential and halves no further than a pass verifies",
    )
    width: str = _setting(
        "adaptive",
        _one_of("adaptive", "fixed"),
        "tokens that a pass verifies for each request: as many as pay, or always "
        "--speculative-num-draft-tokens; a GPU with CUDA graphs has only fixed",
    )
    acceptance: str = _setting(
        "match",
        _one_of("match", "reject"),
        "how sampled requests' step drafts are accepted: drawn with the target's dice and matched, "
        "or by their drafted probabilities (rejection sampling); requests with a sampling_seed are "
        "always matched; a GPU has only match",
    )
    max_completion_tokens: int = _setting(
        512, _whole(1, 65536), "longest completion that is drafted, in tokens"
    )
    endpoint: str = _setting(
        "",
        _endpoint,
        "address of a sidecar that is started by hand, possibly shared by several servers; "
        "by default the server starts its own on a private ipc socket",
    )
    key_file: str = _setting(
        "", _text, "key file that authenticates both ends of a tcp endpoint (written by qspec keys)"
    )
    draft_device: str = _setting(
        "",
        _device,
        "device of the draft model; by default cpu on a cpu server, otherwise the last GPU",
    )
    cores: str = _setting(
        "",
        _cores,
        "processors that the sidecar is pinned to, such as 1 or 2-5; by default it takes what the "
        "server leaves idle of its own",
    )
    mem_fraction: float = _setting(
        0.15, _number(0.01, 0.95), "share of the draft device's memory for draft weights and KV"
    )
    dtype: str = _setting(
        "auto",
        _one_of("auto", "bfloat16", "float16", "float32"),
        "activation type of the draft model",
    )
    draft_slots: int = _setting(
        64, _whole(1, 4096), "completions that the sidecar decodes at the same time, at most"
    )
    guess_tags: str = _setting(
        "user",
        _one_of("user", "everywhere", "off"),
        "where <NGRAMGUESS> tags are read: in raw prompts and messages of users (user), in "
        "messages of every role too (everywhere), or nowhere (off); where they are not read they "
        "are literal text",
    )
    return_provenance: bool = _setting(
        False,
        _switch,
        "tell in meta_info of each output token whether the target chose it or which source "
        "drafted it, also of requests that do not ask for it",
    )
    max_guesses: int = _setting(
        64, _whole(1, 4096), "guesses that a client may send with one request"
    )
    max_guess_tokens: int = _setting(
        4096,
        _whole(1, 1 << 20),
        "tokens of all guesses that a client sends with one request, at most",
    )
    max_request_tokens: int = _setting(
        16384,
        _whole(16, 1 << 24),
        "draft tokens kept for one request, at most; each completion and guess counts as 4 more",
    )
    max_total_tokens: int = _setting(
        4 << 20, _whole(1024, 1 << 30), "draft tokens kept for all requests together, at most"
    )

    def __post_init__(self) -> None:
        if self.max_total_tokens < self.max_request_tokens:
            raise ConfigError(
                f"{flag('max_total_tokens')} is {self.max_total_tokens}, but must be at least "
                f"{flag('max_request_tokens')} ({self.max_request_tokens})"
            )
        if self.endpoint.startswith("tcp://") and not self.key_file:
            raise ConfigError(
                f"{flag('endpoint')} is {self.endpoint!r}, and a tcp endpoint needs "
                f"{flag('key_file')}: the link is authenticated"
            )


def fields() -> tuple[dataclasses.Field[Any], ...]:
    """The settings, in the order of the documentation."""
    return dataclasses.fields(QSpecConfig)


def flag(name: str) -> str:
    """The command line flag of a setting."""
    return FLAG_PREFIX + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def parse(name: str, text: str, *, given_as: str) -> Any:
    """Read the setting `name` from `text`.

    Raises ConfigError that names `given_as` (the flag or the variable), the value, and what is
    allowed.
    """
    field = QSpecConfig.__dataclass_fields__[name]
    try:
        return field.metadata["parse"](text)
    except ValueError as error:
        raise ConfigError(f"{given_as} is {text!r}, but must be {error}") from None


def from_environment(environ: Mapping[str, str] = os.environ) -> QSpecConfig:
    """The settings that the environment gives.

    Raises ConfigError for a value or a combination that is not allowed, and for a variable with
    the prefix of QSPEC that is no setting (a misspelt one would be ignored otherwise).
    """
    known = {variable(field.name): field.name for field in fields()}
    unknown = sorted(
        name for name in environ if name.startswith(ENV_PREFIX) and name not in known.keys() | _OWN
    )
    if unknown:
        raise ConfigError(f"{unknown[0]} is not a setting of QSPEC; known are {', '.join(known)}")
    given = {
        name: parse(name, environ[variable_name], given_as=variable_name)
        for variable_name, name in known.items()
        if variable_name in environ
    }
    return QSpecConfig(**given)


def to_environment(settings: Mapping[str, str]) -> None:
    """Write settings, as text by name, to this process's environment for those it will start."""
    for name, text in settings.items():
        os.environ[variable(name)] = text


_OWN = frozenset({ENV_PREFIX + "CACHE"})
"""Variables with our prefix that are not server settings: the demo models' cache folder."""
