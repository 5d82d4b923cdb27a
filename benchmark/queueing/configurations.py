"""The configurations of `bench_queue`, which differ only in speculation and cores."""

from __future__ import annotations

from benchmark.harness.configuration import Configuration, Settings

BASELINE = "none"
BASELINE_ALL_CORES = "none-equal"
LARGEST = "qspec-8"
COMPLETIONS = {"qspec-1": 1, "qspec-2": 2, "qspec-4": 4, LARGEST: 8}
ALL_CORES = {BASELINE: BASELINE_ALL_CORES, "ngram": "ngram-equal", "lookup": "lookup-equal"}
"""Configurations without a sidecar, each with its twin on the cores of target and sidecar."""
NAMES = tuple(name for pair in ALL_CORES.items() for name in pair) + tuple(COMPLETIONS)
MEM_FRACTION = 0.06
"""KV for about 50 thousand tokens of the demo's draft model."""

_PLAIN = {
    BASELINE: "no speculation",
    "ngram": "SGLang's own NGRAM speculation with its default settings",
    "lookup": "QSPEC without a draft model: drafts from a request's prompt and output",
}
DESCRIPTIONS = {
    **{name: f"{text}, on the target's cores" for name, text in _PLAIN.items()},
    **{ALL_CORES[name]: f"{name} on the cores of target and sidecar" for name in _PLAIN},
    **{name: f"QSPEC, {n} drafted completions" for name, n in COMPLETIONS.items()},
}


def configuration(name: str, settings: Settings) -> Configuration:
    """The configuration `name`, one of NAMES.

    One server serves all numbers of completions, because a request sets its own number.
    """
    if name in COMPLETIONS:
        most = str(COMPLETIONS[LARGEST])
        flags = settings.qspec("--speculative-qspec-completions", most, mem_fraction=MEM_FRACTION)
        asked = {} if name == LARGEST else {"qspec_completions": COMPLETIONS[name]}
        return Configuration(name, settings, flags, settings.target_cores, asked)
    plain = name.removesuffix("-equal")
    algorithm = {BASELINE: None, "ngram": "NGRAM", "lookup": "QSPEC"}[plain]
    flags = ("--speculative-algorithm", algorithm) if algorithm else ()
    cores = settings.target_cores if name == plain else settings.all_cores
    return Configuration(name, settings, flags, cores)
