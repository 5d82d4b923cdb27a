"""Chooses targets, sidecars, pipeline and slots for a number of GPUs.

All groups of a plan are equal and independent, so one group is simulated and scaled.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.measure.tables import Tables
from sglang_qspec.tools.plan.simulation import Group, GroupFigures, quantile, simulate
from sglang_qspec.tools.plan.target import NONE
from sglang_qspec.tools.plan.trace import Trace

WAVES, FEWEST = 3, 60
"""A batch has WAVES requests for each slot of a simulated target, at least FEWEST requests. Other
traces have FEWEST requests for each target."""
FAN_INS = (2, 4, 8)
"""Targets of a sidecar that are tried, besides 1 and, up to the last, all targets."""
MOST_LOAD = 0.95
"""Load above which a plan counts as overloaded, because the prediction has errors."""
STEP = 1.08
"""Factor between two numbers of GPUs that `Planner.fewest` tries."""
EQUAL = 0.01
"""Relative difference in tokens per second below which the lower latency decides."""
OBJECTIVES = ("mean", "p50", "p95", "p99", "ttft")
"""What an SLO can limit: mean and quantiles of the latency, and the 95th percentile of the time to
the first token."""

Outages = tuple[tuple[float, float], ...]
"""(begin, end) times at which each sidecar is down."""


class Slo(NamedTuple):
    """A limit that each plan should keep."""

    name: str
    """One of OBJECTIVES."""
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A deployment and its predicted figures."""

    targets: int
    sidecars: int
    gpus: int
    """GPUs in use."""
    group: Group
    figures: GroupFigures
    """Figures of the simulated group."""
    scale: float
    """Factor from the times of the simulated part of a batch to those of the whole batch; otherwise
    1."""
    rate: float
    """Output tokens per second of all targets."""
    load: float
    """Tokens per second that arrive, over those that the plan can give; 0 for a batch."""

    @property
    def needed(self) -> float:
        """GPUs that could just serve what arrives."""
        return self.gpus * self.load

    @property
    def is_overloaded(self) -> bool:
        """Whether more arrives than the plan can serve, so that its queue grows without end."""
        return self.load > MOST_LOAD

    def latency(self, name: str) -> float:
        """One of OBJECTIVES, in seconds; infinite if the plan is overloaded."""
        if self.is_overloaded:
            return math.inf
        if name == "mean":
            return self.scale * self.figures.latency
        if name == "ttft":
            return self.scale * quantile(self.figures.first_tokens, 0.95)
        return self.scale * quantile(self.figures.latencies, int(name[1:]) / 100)

    def cost(self, gpu_hour_price: float) -> float:
        """Price of a million output tokens."""
        return self.gpus * gpu_hour_price / 3600 / self.rate * 1e6

    def meets(self, slo: Slo | None) -> bool:
        """Whether the plan serves what arrives and keeps the SLO."""
        if slo is None:
            return not self.is_overloaded
        return self.latency(slo.name) <= slo.seconds


class Planner:
    """Simulates plans for one trace."""

    def __init__(
        self,
        tables: Tables,
        trace: Trace,
        *,
        delay: float = 0.0,
        outages: Outages = (),
        seed: int = 1,
    ) -> None:
        self._tables, self._trace = tables, trace
        self._delay, self._outages, self._seed = delay, outages, seed
        self._capacities: dict[Group, float] = {}

    def plan(self, gpus: int, pipeline: str, slots: int, fan_in: int = 1) -> Plan:
        """The plan on at most `gpus`; a sidecar serves at most `fan_in` targets.

        The sidecars divide the targets evenly. Raises ConfigError if the GPUs do not hold it.
        """
        each, trace = self._tables.gpus, self._trace
        targets, sidecars = self._divide(gpus, pipeline, fan_in)
        # Without a sidecar the targets are independent, so one of them is simulated.
        size = math.ceil(targets / sidecars) if sidecars else 1
        group = Group(pipeline, slots, size, self._delay, self._outages, self._seed)
        share, used = size / targets, targets * each.target + sidecars * each.sidecar
        if not trace.rate:
            arrivals = trace.part(share, max(FEWEST, WAVES * slots) * size, self._seed)
            outcome = simulate(group, self._tables, arrivals)
            # The other requests of the group come before the end of the batch.
            tokens = outcome.tokens / len(arrivals)
            others = max(0.0, trace.requests * share - len(arrivals)) * tokens
            # They are served without the outages, which come once.
            steady = self._capacity(group) if self._outages else outcome.steady_rate
            seconds = outcome.seconds + others / steady
            rate, scale = trace.requests * tokens / seconds, seconds / outcome.seconds
            return Plan(targets, sidecars, used, group, outcome, scale, rate, 0.0)
        outcome = simulate(group, self._tables, trace.part(share, FEWEST * size, self._seed))
        capacity = self._capacity(group) * targets / size
        offered = trace.rate * trace.mean_output
        load = offered / capacity
        return Plan(targets, sidecars, used, group, outcome, 1.0, min(offered, capacity), load)

    def _divide(self, gpus: int, pipeline: str, fan_in: int) -> tuple[int, int]:
        """Numbers of targets and sidecars: the most targets that leave room for their sidecars."""
        each = self._tables.gpus
        if pipeline == NONE:
            targets, sidecars = gpus // each.target, 0
        else:
            sidecars, rest = divmod(gpus, fan_in * each.target + each.sidecar)
            targets = sidecars * fan_in
            if rest >= each.target + each.sidecar:
                sidecars, targets = sidecars + 1, targets + (rest - each.sidecar) // each.target
        if not targets:
            least = each.target + (0 if pipeline == NONE else each.sidecar)
            raise ConfigError(f"--gpus is {gpus}, but must be at least {least} for {pipeline}")
        return targets, sidecars

    def _capacity(self, group: Group) -> float:
        """Output tokens per second of a group that always has waiting requests, and no outage."""
        group = replace(group, outages=())
        if group not in self._capacities:
            count = max(FEWEST, WAVES * group.slots) * group.targets
            arrivals = self._trace.at_once().part(1.0, count, self._seed)
            self._capacities[group] = simulate(group, self._tables, arrivals).steady_rate
        return self._capacities[group]

    def plans(self, gpus: int, pipelines: Sequence[str], slots: Sequence[int]) -> list[Plan]:
        """Plans with each pipeline and number of slots and one target for a sidecar, and the best
        of these with more targets for a sidecar. Empty if the GPUs hold none.

        For arrivals over time, the best are those with the lowest latency and with the most
        capacity.
        """
        each = self._tables.gpus
        drafts = NONE not in pipelines
        if gpus < each.target + (each.sidecar if drafts else 0):
            return []
        found = [self.plan(gpus, pipeline, n) for pipeline in pipelines for n in slots]
        shapes = [max(found, key=lambda plan: (plan.rate, -plan.latency("mean"))).group]
        if self._trace.rate:
            shapes.append(min(found, key=lambda plan: plan.needed).group)
        most = (gpus - each.sidecar) // each.target
        fan_ins = {n for n in (*FAN_INS, most) if 1 < n <= min(most, FAN_INS[-1])}
        for shape in dict.fromkeys(shapes) if drafts else ():
            worth = max(_worth(plan) for plan in found if plan.group == shape)
            for fan_in in sorted(fan_ins):
                found.append(self.plan(gpus, shape.pipeline, shape.slots, fan_in))
                before, worth = worth, _worth(found[-1])
                if worth < before:  # with still more targets the drafts come too late
                    break
        return found

    def fewest(self, plan: Plan, slo: Slo) -> Plan:
        """The plan of the same shape on the fewest GPUs that keeps the SLO, within STEP."""
        group = plan.group
        gpus = max(1, int(plan.needed))
        while gpus < plan.gpus:
            with contextlib.suppress(ConfigError):
                found = self.plan(gpus, group.pipeline, group.slots, group.targets)
                if found.meets(slo):
                    return found
            gpus = max(gpus + 1, int(gpus * STEP))
        return plan

    def sweep(self, gpus: int, group: Group) -> list[Plan]:
        """The throughput of plans like `group` by the number of slots, with full targets.

        The seconds from admission to the end of an answer then do not depend on the arrivals.
        """
        planner = Planner(
            self._tables,
            self._trace.at_once(),
            delay=self._delay,
            outages=self._outages,
            seed=self._seed,
        )
        slots = itertools.takewhile(
            lambda n: n <= self._tables.passes.most_requests, (4**n for n in itertools.count())
        )
        return [planner.plan(gpus, group.pipeline, number, group.targets) for number in slots]


def _worth(plan: Plan) -> tuple[float, float]:
    """Orders plans for one trace by what a GPU can serve: of arrivals over time, or of a batch."""
    return -plan.needed, plan.rate / plan.gpus


def best(plans: Sequence[Plan], slo: Slo | None) -> Plan:
    """The plan with the most tokens per second that keeps the SLO.

    If none does, the one with the lowest value of the SLO. Plans within EQUAL of the fastest are
    equal in tokens per second; the lowest mean latency decides among them.
    """
    able = [plan for plan in plans if plan.meets(slo)]
    if slo is not None and not able:
        return min(plans, key=lambda plan: (plan.latency(slo.name), -plan.rate))
    able = able or list(plans)
    limit = (1.0 - EQUAL) * max(plan.rate for plan in able)
    return min((p for p in able if p.rate >= limit), key=lambda plan: plan.latency("mean"))
