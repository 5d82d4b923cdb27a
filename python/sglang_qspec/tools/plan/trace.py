"""Arrivals: all at once, at random times (Poisson), or from a recorded log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from sglang_qspec.errors import ConfigError, shown

MANY = 1_000_000_000
"""Requests of a trace at most; such a trace does not end before a simulation."""
MOST_PROMPT = 1 << 20
"""Prompt tokens of a request at most."""
MOST_OUTPUT = 1 << 17
"""Output tokens of a request at most, because a simulation keeps a number for each."""
RATES = (1e-6, 1e6)
"""Lowest and highest rate of random arrivals."""
ALLOWED = "batch:REQUESTS, poisson:RATE:REQUESTS or a JSONL file"


class Arrival(NamedTuple):
    """A request of the trace."""

    seconds: float
    """Time of the arrival after the start, or after the first request of a log."""
    prompt: int
    """Prompt tokens."""
    output: int
    """Output tokens."""


class LogLine(msgspec.Struct, frozen=True):
    """A line of a recorded log."""

    seconds: Annotated[float, msgspec.Meta(ge=0)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROMPT)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_OUTPUT)]


class Trace(NamedTuple):
    """Arrivals of a whole deployment.

    A synthetic trace draws only the requests that a simulation needs. So a million requests cost
    nothing.
    """

    requests: int
    rate: float
    """Requests per second; 0 if all arrive at once."""
    recorded: Sequence[Arrival]
    """The log in the order of time; empty for a synthetic trace."""
    prompt: int
    """Prompt tokens of a synthetic request."""
    output: int
    """Mean output tokens of a synthetic request, which are from half to one and a half times it."""

    @property
    def mean_output(self) -> float:
        """Mean output tokens of a request."""
        if not self.recorded:
            return self.output
        return sum(arrival.output for arrival in self.recorded) / len(self.recorded)

    @property
    def mean_prompt(self) -> float:
        """Mean prompt tokens of a request."""
        if not self.recorded:
            return self.prompt
        return sum(arrival.prompt for arrival in self.recorded) / len(self.recorded)

    @property
    def context(self) -> int:
        """Tokens of a request that is half answered, on average."""
        return round(self.mean_prompt + self.mean_output / 2)

    def at_once(self) -> Trace:
        """Any number of such requests that all arrive at once."""
        recorded = [arrival._replace(seconds=0.0) for arrival in self.recorded]
        return self._replace(requests=MANY, rate=0.0, recorded=recorded)

    def part(self, share: float, most: int, seed: int) -> list[Arrival]:
        """Arrivals at one of 1 / `share` equal groups, at most the first `most`.

        A router that takes groups in turn gives a group every (1 / share)-th request. The group is
        one of those with the most requests.
        """
        count = max(1, min(most, math.ceil(self.requests * share - 1e-9)))
        if self.recorded:
            size = len(self.recorded)
            return [self.recorded[int(number / share) % size] for number in range(count)]
        rng = np.random.default_rng(seed)
        low, high = self.output - self.output // 2, self.output + self.output // 2
        outputs = rng.integers(low, high, count, endpoint=True).tolist()
        # The time until the (1 / share)-th of the requests at random times.
        gaps = rng.gamma(1.0 / share, 1.0 / self.rate, count) if self.rate else np.zeros(count)
        times = gaps.cumsum().tolist()
        return [Arrival(*each) for each in zip(times, [self.prompt] * count, outputs, strict=True)]


def parse(text: str, prompt: int, output: int) -> Trace:
    """Read `--trace`; `prompt` and `output` are the tokens of synthetic requests.

    Raises ConfigError with what is allowed.
    """
    kind, _, rest = text.partition(":")
    if kind not in ("batch", "poisson"):
        return _recorded(Path(text))
    rate, _, count = rest.rpartition(":")
    try:
        requests = int(count)
        per_second = float(rate) if kind == "poisson" else 0.0
    except ValueError:
        requests, per_second = 0, 0.0
    fits = RATES[0] <= per_second <= RATES[1] if kind == "poisson" else not rate
    if not 1 <= requests <= MANY or not fits:
        raise ConfigError(
            f"--trace is {shown(text)}, but must be {ALLOWED}, with REQUESTS from 1 to {MANY} and "
            f"a RATE from {RATES[0]:g} to {RATES[1]:g}, such as batch:1000 or poisson:12.5:1000"
        )
    return Trace(requests, per_second, (), prompt, output)


def _recorded(path: Path) -> Trace:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace is {str(path)!r}, but must be {ALLOWED}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                each = msgspec.json.decode(line, type=LogLine)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: {error}") from None
            found.append(Arrival(each.seconds, each.prompt_tokens, each.output_tokens))
    if not found:
        raise ConfigError(f"{path}: the log has no request")
    found.sort()
    begin = found[0].seconds
    found = [each._replace(seconds=each.seconds - begin) for each in found]
    span = found[-1].seconds
    return Trace(len(found), len(found) / span if span else 0.0, found, 0, 0)
