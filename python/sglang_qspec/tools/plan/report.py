"""What `qspec plan` prints: a table of the plans, and what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_qspec.tools.measure.tables import Tables
from sglang_qspec.tools.plan.limits import lines_of
from sglang_qspec.tools.plan.planner import OBJECTIVES, Plan, Slo
from sglang_qspec.tools.plan.trace import Trace
from sglang_qspec.tools.table import aligned

DRAFTED, PLAIN = "QSPEC", "no speculation"
"""Names of the plans."""
HEAD = ("predicted", "targets", "sidecars", "pipeline", "slots", "tokens/s", "price/M")
SHOWN = ("mean", "p95", "ttft")
"""Latencies of the table."""


@dataclass(frozen=True)
class Report:
    """The plans that were chosen for a number of GPUs."""

    gpus: int
    tables: Tables
    trace: Trace
    chosen: Mapping[str, Plan]
    """The best plan with QSPEC, if the GPUs hold one, and the best without speculation."""
    fewest: Mapping[str, Plan]
    """The plans on the fewest GPUs that keep the SLO; empty without an SLO, and for a batch."""
    slo: Slo | None
    price: float
    """Price of a GPU hour."""
    gbit: float
    """Bandwidth of a sidecar's link."""

    def text(self) -> str:
        """For a terminal."""
        tables = self.tables
        origin = "measured" if tables.source == "measured" else "computed from data sheets"
        head = (*HEAD, *(f"{name} s" for name in SHOWN), "tokens/pass")
        parts = [
            f"{self.gpus} GPUs, {tables.machine}: target {tables.target}, draft model "
            f"{tables.draft}, {self.trace.requests} requests. Times are {origin}.",
            aligned([head, *(self._row(name) for name in self.chosen)]),
            self._comparison(),
            "\n".join(map(self._slo_line, self.chosen)) if self.slo is not None else "",
            "\n".join(self.limits),
        ]
        return "\n\n".join(filter(None, parts))

    @property
    def limits(self) -> list[str]:
        """What limits more targets."""
        return lines_of(next(iter(self.chosen.values())), self.trace, self.gbit)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "gpus": self.gpus,
            "source": self.tables.source,
            "machine": self.tables.machine,
            "plans": {name: self._record(plan) for name, plan in self.chosen.items()},
            "fewest_gpus": {name: self._record(plan) for name, plan in self.fewest.items()},
            "limits": self.limits,
        }

    def _row(self, name: str) -> tuple[str, ...]:
        plan = self.chosen[name]
        return (
            name,
            str(plan.targets),
            str(plan.sidecars),
            plan.group.pipeline,
            str(plan.group.slots),
            f"{plan.rate:.0f}",
            f"{plan.cost(self.price):.3f}",
            *(f"{plan.latency(each):.2f}" for each in SHOWN),
            f"{plan.figures.tokens_per_pass:.2f}",
        )

    def _comparison(self) -> str:
        plain = self.chosen[PLAIN]
        if DRAFTED not in self.chosen:
            return "The GPUs do not hold a target and a sidecar."
        drafted = self.chosen[DRAFTED]
        if not drafted.load:
            ratio = drafted.rate / plain.rate
            return f"QSPEC gives {ratio:.2f} times the tokens/s of no speculation."
        text = (
            f"What arrives is {100 * drafted.load:.0f} % of the capacity with QSPEC, and "
            f"{100 * plain.load:.0f} % of it without speculation."
        )
        if drafted.is_overloaded or plain.is_overloaded:
            text += " The latency is inf where more arrives than the plan can serve."
        return text

    def _slo_line(self, name: str) -> str:
        assert self.slo is not None
        plan = self.chosen[name]
        verb = "keeps" if plan.meets(self.slo) else "does not keep"
        seconds = plan.latency(self.slo.name)
        line = f"{name} {verb} {self.slo.name} <= {self.slo.seconds:g} s ({seconds:.2f} s)."
        if name in self.fewest:
            least = self.fewest[name]
            line += (
                f" {least.gpus} GPUs are enough ({least.targets} targets with {least.group.slots} "
                f"slots, {least.sidecars} sidecars), for {least.cost(self.price):.3f} a million "
                "tokens."
            )
        return line

    def _record(self, plan: Plan) -> dict[str, Any]:
        seconds = {n: None if plan.is_overloaded else plan.latency(n) for n in OBJECTIVES}
        return {
            "targets": plan.targets,
            "sidecars": plan.sidecars,
            "targets_per_sidecar": plan.group.targets if plan.sidecars else 0,
            "gpus": plan.gpus,
            "pipeline": plan.group.pipeline,
            "slots": plan.group.slots,
            "tokens_per_s": plan.rate,
            "price_per_million_tokens": plan.cost(self.price),
            "seconds": seconds,
            "tokens_per_pass": plan.figures.tokens_per_pass,
            "sidecar_busy": plan.figures.sidecar_busy,
            "load": plan.load,
            "meets_slo": plan.meets(self.slo),
        }
