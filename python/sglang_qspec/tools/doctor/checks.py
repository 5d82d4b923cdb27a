"""The checks in their order, and the condition of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from sglang_qspec.tools.doctor import cores, devices, models, software, start, system
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, examine
from sglang_qspec.tools.doctor.measure import measure


class Check(NamedTuple):
    """A check, and whether it can run after the checks before it."""

    name: str
    run: Callable[[Case], Finding]
    applies: Callable[[Case], bool] = lambda _: True


def _on_cpu(case: Case) -> bool:
    return case.kind == "cpu"


def _has_cpu_sidecar(case: Case) -> bool:
    return case.kind == case.draft_kind == "cpu"


def _has_head(case: Case) -> bool:
    return case.model is not None and case.settings is not None and bool(case.settings.head_path)


def _has_draft_head(case: Case) -> bool:
    settings = case.settings
    return case.draft_model is not None and settings is not None and bool(settings.draft_model_head)


def _measures(case: Case) -> bool:
    return case.measure and case.placement is not None and case.draft is not None


def _starts(case: Case) -> bool:
    fits = case.draft_model is None or case.tokenizers_fit
    return case.target is not None and fits and case.settings is not None


CHECKS = (
    Check("python", software.python),
    Check("package", software.package),
    Check("settings", software.settings),
    Check("descriptors", system.descriptors),
    Check("sockets", system.sockets),
    Check("endpoint", system.endpoint, lambda case: bool(case.settings and case.settings.endpoint)),
    Check("port", system.port),
    Check("device", devices.device),
    Check("cores", cores.cores, _on_cpu),
    Check("sidecar cores", cores.sidecar_cores, _has_cpu_sidecar),
    Check("sglang", software.sglang, lambda case: case.kind is not None),
    Check("hooks", software.hooks, lambda case: case.sglang),
    Check("toolkit", devices.toolkit, lambda case: case.sglang and case.kind == "cuda"),
    Check("target", models.target, lambda case: case.sglang and case.model is not None),
    Check("draft model", models.draft, lambda case: case.sglang and case.draft_model is not None),
    Check("head", models.head, _has_head),
    Check("draft model's head", models.draft_head, _has_draft_head),
    Check("tokenizers", models.tokenizers, lambda case: bool(case.target and case.draft)),
    Check("start", start.start, _starts),
    Check("placement", start.placement, lambda case: case.arguments is not None),
    Check("measure", measure, _measures),
)
"""A check that needs the result of a check that failed is left out."""


def examine_all(case: Case) -> Iterator[Finding]:
    """Run the checks one by one."""
    for check in CHECKS:
        if check.applies(case):
            yield examine(check.name, partial(check.run, case))
