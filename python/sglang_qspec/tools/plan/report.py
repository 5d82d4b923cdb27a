"""What `qspec plan` prints: whether a sidecar pays, a table of the plans, and what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_qspec.tools.measure.tables import Tables
from sglang_qspec.tools.plan.limits import lines_of
from sglang_qspec.tools.plan.planner import OBJECTIVES, Plan, Slo, best
from sglang_qspec.tools.plan.trace import Trace
from sglang_qspec.tools.table import aligned, counted

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
        alpha = tables.conditions.get("alpha")
        head = (*HEAD, *(f"{name} s" for name in SHOWN), "tokens/pass")
        parts = [
            self.verdict,
            f"{counted(self.gpus, 'GPU')}, {tables.machine}: target {tables.target}, draft model "
            f"{tables.draft}, {self.trace.requests} requests. Times are {origin}"
            + (f", and the agreement is {alpha}." if alpha else "."),
            aligned([head, *(self._row(name) for name in self.chosen)]),
            self._loads() if self.trace.rate else "",
            "\n".join(map(self._slo_line, self.chosen)) if self.slo is not None else "",
            "\n".join(self.limits),
        ]
        return "\n\n".join(filter(None, parts))

    @property
    def compared(self) -> Mapping[str, Plan]:
        """The plans that decide whether a sidecar pays: those on the fewest GPUs, or `chosen`."""
        return self.fewest if self.fewest.keys() == self.chosen.keys() else self.chosen

    @property
    def best(self) -> str:
        """Name of the better plan: with an SLO that both keep the one on fewer GPUs, of a batch the
        faster one, and else by the SLO and the latency."""
        if self.compared is self.fewest:
            return min(self.fewest, key=lambda name: self.fewest[name].gpus)
        if self.slo is None and not self.trace.rate:
            return max(self.chosen, key=lambda name: self.chosen[name].rate)
        chosen = best(list(self.chosen.values()), self.slo)
        return next(name for name, plan in self.chosen.items() if plan is chosen)

    @property
    def verdict(self) -> str:
        """Whether a sidecar pays, with the figures of both plans."""
        plain = self.compared[PLAIN]
        without = f"{self._reached(plain)} from {counted(plain.targets, 'plain server')}"
        if DRAFTED not in self.compared:
            return f"No sidecar: no GPU is left for one beside a target; {without}."
        plan = self.compared[DRAFTED]
        made_of = f"{counted(plan.targets, 'target')} with {counted(plan.sidecars, 'sidecar')}"
        drafted = f"{self._reached(plan)} from {made_of}"
        if self.best == PLAIN:
            return f"No sidecar: {without}, and {drafted}, the best plan with a sidecar."
        cards = self.tables.gpus.sidecar
        return (
            f"A sidecar pays: {drafted}, and {without}. One sidecar "
            f"{'card' if cards == 1 else f'of {cards} GPUs'} feeds "
            f"{counted(plan.group.targets, 'target')} and drafts "
            f"{100 * plan.figures.sidecar_busy:.0f} % of the time."
        )

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
            "conditions": self.tables.conditions,
            "best": self.best,
            "verdict": self.verdict,
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

    def _reached(self, plan: Plan) -> str:
        """What decides between plans: throughput of a batch, latency of arrivals or for an SLO."""
        if self.slo is not None and self.compared is self.fewest:
            return f"{self.slo.name} <= {self.slo.seconds:g} s on {counted(plan.gpus, 'GPU')}"
        if plan.is_overloaded:
            return "more requests than can be served"
        figures = [] if self.trace.rate else [f"{plan.rate:.0f} tokens/s"]
        if self.trace.rate or self.slo is not None:
            name = "mean" if self.slo is None else self.slo.name
            figures.append(f"{name} latency {plan.latency(name):.2f} s")
        return " with ".join(figures)

    def _loads(self) -> str:
        loads = [f"{100 * plan.load:.0f} % ({name})" for name, plan in self.chosen.items()]
        text = f"What arrives is this share of the capacity: {', '.join(loads)}."
        if any(plan.is_overloaded for plan in self.chosen.values()):
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
                f" Enough: {counted(least.gpus, 'GPU')} ({counted(least.targets, 'target')} with "
                f"{counted(least.group.slots, 'slot')}, {counted(least.sidecars, 'sidecar')}), for "
                f"{least.cost(self.price):.3f} a million tokens."
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
