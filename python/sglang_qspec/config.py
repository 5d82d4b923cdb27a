"""The settings of QSPEC, with their defaults, allowed values, flags and environment variables.

The field `completions` has the flag `--speculative-qspec-completions` and the environment variable
`SGLANG_QSPEC_COMPLETIONS`. If SGLang already has a flag for a setting, QSPEC uses SGLang's flag,
such as `--speculative-draft-model-path` and `--speculative-num-draft-tokens`.

Settings reach SGLang's subprocesses through the environment, because a plugin cannot add fields to
SGLang's arguments. The server therefore writes flags to environment variables.

This file reads settings and devices from the environment, `engine/placement/environment.py` reads
the rest.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_qspec import values
from sglang_qspec.errors import ConfigError

ALGORITHM = "QSPEC"
"""The value of --speculative-algorithm."""
FLAG_PREFIX = "--speculative-qspec-"
ENV_PREFIX = "SGLANG_QSPEC_"
PLACEMENT_VARIABLE = ENV_PREFIX + "PLACEMENT"
"""Variable in which a server's processes hand on where its sidecar runs (see
`engine/placement/environment.py`)."""
MAX_COMPLETIONS = 64
"""Maximum number of completions drafted for one request."""
AUTO_CORES = "auto"
"""Value of the setting `cores` with which the server divides its CPUs."""
SHARED_CORES = "shared"
"""Value of the setting `cores` with which target and sidecar run on the same CPUs."""
MAX_DRAFT_TOKENS = 64
"""Maximum number of tokens that a verify pass takes for one request, including the last committed
token."""
MAX_SERVER_TOKENS = 8 << 20
"""Default limit on the text tokens, and separately on the draft tokens, that a sidecar keeps for
one server. A text token takes eight bytes and a draft token four, so a server takes about 100 MiB.
"""
MAX_BACKLOG_S = 10.0
"""Default backlog, in seconds, up to which a sidecar of several servers skips no work."""
LONGEST_BACKLOG_S = 86400
"""Largest value of `--max-backlog`, in seconds. No backlog becomes longer, so a sidecar with this
value skips no work."""
SLOTS_ON_CPU, SLOTS_ON_GPU = 64, 256
"""Default of the maximum number of completions in a pass of the sidecar."""
SHARED_FRACTION = 0.15
"""Default fraction of a device's memory for the draft model, where the target uses the device too.
"""
PIPELINES = ("sequential", "halves", "ahead")
"""Pipelines: ways to interleave step drafts with verification. `auto` selects one of them."""
MODES = ("queue", *PIPELINES, "auto")
"""Values of the setting `mode`."""


def _setting(default: Any, parse: values.Parser, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "help": help})


@dataclass(frozen=True)
class QSpecConfig:
    """Checked settings of one server. A change needs a restart."""

    completions: int = _setting(
        8,
        values.whole(1, MAX_COMPLETIONS),
        "number of completions drafted for each waiting prompt: one greedy, the others sampled",
    )
    temperature: float = _setting(
        0.6,
        values.number(0.0, 2.0),
        "sampling temperature of all completions except the greedy one",
    )
    top_p: float = _setting(
        1.0,
        values.number(0.0, 1.0),
        "nucleus sampling of completions: cumulative probability of the most likely tokens that "
        "are sampled from; 1 means all tokens",
    )
    disable_greedy_first: bool = _setting(
        False, values.switch, "sample all completions, including the first one"
    )
    on_admission: str = _setting(
        "defer",
        values.one_of("defer", "stop", "continue"),
        "what the sidecar does with a request once the target serves it: defer (complete the "
        "drafts of waiting requests first), stop (draft nothing more for it, in any mode) or "
        "continue (keep its place in the queue)",
    )
    mode: str = _setting(
        "auto",
        values.one_of(*MODES),
        "which requests the sidecar drafts for: waiting requests only (queue), or served requests "
        "first and then waiting ones. Served requests get drafts between two target passes "
        "(sequential), for one half of the batch while the target verifies the other half "
        "(halves), or ahead of the pass that runs (ahead); auto selects the fastest of these by "
        "measured times",
    )
    step_tokens: int = _setting(
        16,
        values.whole(1, 64),
        "lookahead of step drafts: number of tokens drafted ahead of the committed output of a "
        "served request; sequential and halves draft no more than one pass verifies",
    )
    width: str = _setting(
        "adaptive",
        values.one_of("adaptive", "fixed"),
        "number of tokens that a pass verifies for each request: adaptive (the number that is "
        "expected to be fastest) or fixed (always --speculative-num-draft-tokens; a ragged pass "
        "leaves out the padding)",
    )
    verify: str = _setting(
        "auto",
        values.one_of("auto", "tree", "ragged"),
        "which tokens a pass verifies: the same number for each request, padded where a request "
        "has fewer drafts (tree), or the likeliest tokens of all requests without padding "
        "(ragged; needs the attention backend qspec_cpu, or fa3 or fa4 on a GPU). auto is ragged "
        "with qspec_cpu, otherwise tree",
    )
    prefill_drafts: str = _setting(
        "off",
        values.one_of("on", "off"),
        "whether the pass over a prompt also verifies drafts of the answer: on (the drafts that "
        "are expected to save more time than their rows cost) or off",
    )
    graph_widths: str = _setting(
        "auto",
        values.widths(MAX_DRAFT_TOKENS),
        "numbers of tokens for each request for which a GPU server captures CUDA graphs, such as "
        "2,4; 1 and --speculative-num-draft-tokens are always captured. auto adds a half, a "
        "quarter and an eighth of --speculative-num-draft-tokens",
    )
    graph_memory: int = _setting(
        2048,
        values.whole(0, 1 << 20),
        "maximum memory in MiB of the CUDA graphs that are captured besides those for "
        "--speculative-num-draft-tokens, and of their buffers; never more than half of the free "
        "memory. The server leaves out widths that do not fit",
    )
    acceptance: str = _setting(
        "match",
        values.one_of("match", "reject"),
        "how the target accepts step drafts of sampled requests: match (sidecar and target sample "
        "with the same seed, and equal tokens are accepted) or reject (rejection sampling with the "
        "draft probabilities); requests with a sampling_seed always use match",
    )
    max_completion_tokens: int = _setting(
        512, values.whole(1, 65536), "maximum length of a drafted completion, in tokens"
    )
    endpoint: str = _setting(
        "",
        values.endpoints,
        "address of a running sidecar, which several servers can share (see qspec sidecar), or a "
        f"comma-separated list of up to {values.MAX_ENDPOINTS} addresses; by default the server "
        "starts its own sidecar on a private ipc socket",
    )
    key_file: str = _setting(
        "",
        values.text,
        "key file that authenticates both ends of a tcp endpoint; qspec keys writes one",
    )
    draft_device: str = _setting(
        "",
        values.device,
        "device of the draft model: cpu, cuda or cuda:N; by default cpu on a CPU server, otherwise "
        "the first of these that exists: a GPU that nobody uses, another GPU with half of its "
        "memory free, the target's GPU",
    )
    head_path: str = _setting(
        "",
        values.text,
        "folder of a head that drafts for running requests: beside a draft model that drafts for "
        "waiting ones, or in the sidecars at the endpoints; a head alone in the server's own "
        "sidecar is the --speculative-draft-model-path",
    )
    draft_model_head: str = _setting(
        "",
        values.text,
        "folder of a Hydra head of the draft model (qspec models train-head --kind hydra), with "
        "which the draft model drafts two tokens in some of its passes; it needs a sidecar on a "
        "CPU, which the server starts",
    )
    jacobi_tokens: int = _setting(
        0,
        values.whole(0, 15),
        "number of tokens of a guessed continuation that the passes of the target improve by "
        "themselves, without a draft model (Jacobi iteration, as in lookahead decoding); 0 for "
        "none. A pass has them where its further rows cost little",
    )
    cores: str = _setting(
        AUTO_CORES,
        values.cores(AUTO_CORES, SHARED_CORES),
        "CPUs that the sidecar is pinned to, such as 1 or 2-5; with auto a CPU server gives it a "
        "quarter of its cores, at least one, while that pays; with shared it uses the server's "
        "CPUs, and drafts on a CPU at the lowest priority",
    )
    mem_fraction: float = _setting(
        0.0,
        values.fraction,
        "fraction of the draft device's memory for the sidecar; 0 means all free memory on a GPU "
        f"of its own, {SHARED_FRACTION} on a CPU, and {SHARED_FRACTION}, or more if the draft "
        "model needs it, on a GPU that others use too",
    )
    dtype: str = _setting(
        "auto",
        values.one_of("auto", "bfloat16", "float16", "float32"),
        "data type of the draft model's activations",
    )
    draft_slots: int = _setting(
        0,
        values.whole(0, 4096),
        f"maximum number of completions that the sidecar decodes in one pass; 0 means "
        f"{SLOTS_ON_CPU} on a CPU and {SLOTS_ON_GPU} on a GPU",
    )
    guess_tags: str = _setting(
        "user",
        values.one_of("user", "everywhere", "off"),
        "where the server reads <NGRAMGUESS> tags: in raw prompts and user messages (user), in raw "
        "prompts and messages of every role (everywhere), or nowhere (off); elsewhere tags are "
        "literal text",
    )
    return_provenance: bool = _setting(
        False,
        values.switch,
        "return the draft source of each output token, or target, in meta_info of all requests; "
        "without it only requests that ask for it get this list",
    )
    max_guesses: int = _setting(
        64, values.whole(1, 4096), "maximum number of guesses in one request"
    )
    max_guess_tokens: int = _setting(
        4096,
        values.whole(1, 1 << 20),
        "maximum number of tokens in all guesses of one request",
    )
    max_request_tokens: int = _setting(
        16384,
        values.whole(16, 1 << 24),
        "maximum number of draft tokens kept for one request; each completion, guess and step "
        "draft counts as 4 additional tokens",
    )
    max_total_tokens: int = _setting(
        4 << 20,
        values.whole(1024, 1 << 30),
        "maximum number of tokens kept for all requests together: drafts, and the prompts and "
        "outputs that drafts are looked up in",
    )

    def __post_init__(self) -> None:
        if self.max_total_tokens < self.max_request_tokens:
            raise ConfigError(
                f"{flag('max_total_tokens')} is {self.max_total_tokens}, but must be at least "
                f"{flag('max_request_tokens')} ({self.max_request_tokens})"
            )
        for endpoint in self.endpoints:
            if endpoint.startswith("tcp://") and not self.key_file:
                raise ConfigError(
                    f"{flag('endpoint')} has {endpoint!r}, but a tcp endpoint needs a key file: "
                    f"write one with `qspec keys PATH` and set {flag('key_file')}"
                )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses in `endpoint`."""
        return values.parse_endpoints(self.endpoint)


def is_qspec(arguments: Any) -> bool:
    """Whether `arguments`, SGLang's or a view of them, choose QSPEC."""
    return (arguments.speculative_algorithm or "").upper() == ALGORITHM


def fields() -> tuple[dataclasses.Field[Any], ...]:
    """All settings, in the order of docs/settings.md."""
    return dataclasses.fields(QSpecConfig)


def flag(name: str) -> str:
    """Command line flag of a setting."""
    return FLAG_PREFIX + name.replace("_", "-")


def variable(name: str) -> str:
    """Environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def parser(name: str) -> values.Parser:
    """Parser of the setting `name`."""
    parse: values.Parser = QSpecConfig.__dataclass_fields__[name].metadata["parse"]
    return parse


def parse(name: str, text: str, *, given_as: str) -> Any:
    """Parse the value of the setting `name`.

    `given_as` is the flag or variable that gave the value, for the error message. Raises
    ConfigError if the value is not allowed.
    """
    try:
        return parser(name)(text)
    except ValueError as error:
        raise ConfigError(f"{given_as} is {text!r}, but must be {error}") from None


def from_environment(environ: Mapping[str, str] = os.environ) -> QSpecConfig:
    """Read the settings from environment variables.

    Raises ConfigError for a value or a combination that is not allowed, and for an unknown variable
    with the prefix of QSPEC, because it is probably a misspelt setting.
    """
    known = {variable(field.name): field.name for field in fields()}
    for error in environment_errors(environ):
        raise error
    return QSpecConfig(
        **{
            name: parse(name, environ[variable_name], given_as=variable_name)
            for variable_name, name in known.items()
            if variable_name in environ
        }
    )


def environment_errors(environ: Mapping[str, str] = os.environ) -> Iterator[ConfigError]:
    """An error for each environment variable that is no setting, or has a value not allowed."""
    known = {variable(field.name): field.name for field in fields()}
    given = sorted(name for name in environ if name.startswith(ENV_PREFIX))
    for name in given:
        if name not in known.keys() | _OWN:
            yield ConfigError(f"{name} is not a setting of QSPEC; allowed are {', '.join(known)}")
    for name in given:
        if name in known:
            try:
                parse(known[name], environ[name], given_as=name)
            except ConfigError as error:
                yield error


def to_environment(settings: Mapping[str, str]) -> None:
    """Write settings (name to text) to this process's environment, for its subprocesses."""
    for name, text in settings.items():
        os.environ[variable(name)] = text


CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
"""Environment variable with which SGLang runs on a CPU."""


def cpu_engine() -> bool:
    """Whether the environment says that SGLang runs on the CPU."""
    return os.environ.get(CPU_ENGINE) == "1"


def use_cpu_engine() -> None:
    """Let SGLang run on the CPU in this process. Call it before the import of sglang."""
    os.environ[CPU_ENGINE] = "1"


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES of this process; None if it is not set."""
    return os.environ.get(_VISIBLE_GPUS)


def environment_with_gpus(visible: str | None) -> dict[str, str]:
    """This process's environment with `visible` as CUDA_VISIBLE_DEVICES; None leaves it unset.

    `visible` comes from `visible_gpus` in another process, because with
    SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS a scheduler process sees only its own GPU.
    """
    environment = dict(os.environ)
    for name in (_VISIBLE_GPUS, "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS"):
        environment.pop(name, None)
    if visible is not None:
        environment[_VISIBLE_GPUS] = visible
    return environment


def server_environment(device: str) -> dict[str, str]:
    """The environment of a server on `device`, `cpu` or `cuda`."""
    environment = environment_with_gpus(visible_gpus())
    return {**environment, CPU_ENGINE: "1"} if device == "cpu" else environment


_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_OWN = frozenset({ENV_PREFIX + "CACHE", PLACEMENT_VARIABLE})
"""Variables with the prefix that are no server settings: CACHE is the folder of the demo models."""
