"""The servers that are compared: they differ in speculation and cores, and in nothing else."""

from __future__ import annotations

from types import MappingProxyType

from benchmark.harness.configuration import Configuration, Settings

BASELINE = "none"
BASELINE_ALL_CORES = "none-equal"
LARGEST = "qspec-8"
COMPLETIONS = {"qspec-1": 1, "qspec-2": 2, "qspec-4": 4, LARGEST: 8}
ALL_CORES = {BASELINE: BASELINE_ALL_CORES, "ngram": "ngram-equal", "lookup": "lookup-equal"}
"""What needs no sidecar, and the same on the cores of target and sidecar together."""
NAMES = tuple(name for pair in ALL_CORES.items() for name in pair) + tuple(COMPLETIONS)

_PLAIN = {
    BASELINE: "no speculation",
    "ngram": "SGLang's own NGRAM speculation as it comes",
    "lookup": "QSPEC without a draft model: drafts from a request's prompt and output",
}
DESCRIPTIONS = {
    **{name: f"{text}, on the target's cores" for name, text in _PLAIN.items()},
    **{ALL_CORES[name]: f"{name} on the cores of target and sidecar" for name in _PLAIN},
    **{name: f"QSPEC, {n} drafted completions" for name, n in COMPLETIONS.items()},
}


def configuration(name: str, settings: Settings) -> Configuration:
    """The configuration `name`, one of NAMES.

    All numbers of completions are served by one server, whose requests ask for theirs. On a GPU
    target and sidecar share the first one.
    """
    both = (*settings.target_cores, *settings.sidecar_cores)
    if name in ALL_CORES.values():
        plain = next(key for key, value in ALL_CORES.items() if value == name)
        return Configuration(name, settings, configuration(plain, settings).speculation, both)
    if name in COMPLETIONS:
        speculation = ["--speculative-algorithm", "QSPEC"]
        speculation += ["--speculative-draft-model-path", str(settings.draft_model)]
        speculation += ["--speculative-qspec-completions", str(COMPLETIONS[LARGEST])]
        if settings.on_gpu:
            speculation += ["--speculative-qspec-draft-device", "cuda:0"]
        else:
            # Several servers wait in memory at once; this is KV for 50 thousand tokens of the demo.
            speculation += ["--speculative-qspec-mem-fraction", "0.06"]
        if settings.sidecar_cores:
            cores = ",".join(map(str, settings.sidecar_cores))
            speculation += ["--speculative-qspec-cores", cores]
        asked = {} if name == LARGEST else {"qspec_completions": COMPLETIONS[name]}
        return Configuration(
            name, settings, tuple(speculation), settings.target_cores, MappingProxyType(asked)
        )
    algorithm = {BASELINE: None, "ngram": "NGRAM", "lookup": "QSPEC"}[name]
    flags = ("--speculative-algorithm", algorithm) if algorithm else ()
    return Configuration(name, settings, flags, settings.target_cores)
