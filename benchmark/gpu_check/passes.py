"""Serves mixed requests, counts the passes outside CUDA graphs, and checks the sampled texts.

On a GPU with SGLang's fa3 a second server verifies ragged chains, which fa3 does not by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

from benchmark.gpu_check.findings import Options, Steps
from benchmark.gpu_check.serving import (
    LOGGING,
    Passes,
    capability,
    captured,
    demo_settings,
    passes_of,
)
from benchmark.harness.configuration import Configuration
from benchmark.harness.dataset import render
from benchmark.harness.report import Table
from benchmark.harness.server import Server
from benchmark.harness.speculation import update_settings, wait_for_sidecar
from benchmark.prompts import PROMPTS
from sglang_qspec.config import MODES
from test.engine.frequencies import PARAMETERS, check_first_tokens

SLOTS = 8
OFF = {"custom_params": {"qspec_enabled": False}}
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
PENALISED: dict[str, Any] = {"temperature": 0.7, "frequency_penalty": 0.3, "min_new_tokens": 4}
MIN_P: dict[str, Any] = {"temperature": 1.0, "min_p": 0.1}
MIXES: Mapping[str, Sequence[dict[str, Any]]] = {
    "without drafts": [{**GREEDY, **OFF}],
    "greedy": [GREEDY],
    "top-k and top-p": [SAMPLED],
    "min-p": [MIN_P],
    "penalties": [PENALISED],
    "mixed": [
        GREEDY,
        {**GREEDY, **OFF},
        SAMPLED,
        MIN_P,
        PENALISED,
        {**SAMPLED, "sampling_seed": 5},
    ],
}
"""By the name of a mix: sampling parameters, which requests that run at once take in turn."""
HALVES = "halves"
NEAR_TIE = 0.25
"""Largest difference of the log probabilities of two tokens that rounding may swap: two steps of
bfloat16 between 16 and 32, where logits often are."""
DISTRIBUTIONS = ("top-k, presence", "min-p, frequency")
"""Names of parameters in `test.engine.frequencies`."""


RAGGED = ("--speculative-qspec-verify", "ragged", "--attention-backend", "fa3")
HOPPER = 9
"""Major compute capability of Hopper, on which SGLang always has fa3."""


def passes(options: Options, steps: Steps) -> None:
    """Serve each mix by a server in bfloat16, and count its passes."""
    serve(options, steps, "", ())
    if options.on_gpu and not options.flags and capability()[0] == HOPPER:
        with steps.check("ragged"):
            serve(options, steps, "ragged ", RAGGED)


def serve(options: Options, steps: Steps, prefix: str, flags: Sequence[str]) -> None:
    """The checks of one server; their names begin with `prefix`."""
    settings = demo_settings(options, "bfloat16", SLOTS)
    every = settings.qspec(*LOGGING, *flags)
    configuration = Configuration("QSPEC", settings, every, settings.target_cores)
    tokens, samples = (8, 150) if options.emulated else (64, 300)
    prompts = render(settings.model, PROMPTS)
    found: dict[str, Passes] = {}
    with configuration.server() as server:
        wait_for_sidecar(server)
        for name, params in MIXES.items():
            found[name] = count(server, prompts, params, tokens)
        update_settings(server, {"qspec_mode": MODES.index(HALVES)})
        found[HALVES] = count(server, prompts, [GREEDY], tokens)
        update_settings(server, {"qspec_mode": MODES.index("auto")})
        steps.found.figures[f"{prefix}passes"] = {
            name: {"total": one.total, "eager": one.eager} for name, one in found.items()
        }
        steps.found.figures[f"{prefix}captured"] = captured(server.log)
        steps.found.tables.append(table(found, options, prefix))
        with steps.check(f"{prefix}counted"):
            assert all(one.total for one in found.values()), "the server counted no decode pass"
        eager_passes = sum(one.eager for one in found.values())
        steps.found.eager_passes = (steps.found.eager_passes or 0) + eager_passes
        with steps.check(f"{prefix}graphs"):
            eager = [name for name, one in found.items() if one.eager]
            assert not eager, f"passes outside CUDA graphs: {', '.join(eager)}"
        # Drafts that do not pay are verified as well, for example those of a CPU's wide passes.
        update_settings(server, {"qspec_fixed_width": 1})
        for name in DISTRIBUTIONS:
            with steps.check(f"{prefix}sampled {name}"):
                check_first_tokens(server, PARAMETERS[name], {}, samples)
        update_settings(server, {"qspec_fixed_width": 0})
        with steps.check(f"{prefix}bfloat16 answers"):
            share, gaps = compare(server, prompts, tokens)
            steps.found.figures[f"{prefix}equal_bfloat16_answers"] = share
            steps.found.figures[f"{prefix}bfloat16_gaps"] = gaps
            assert max(gaps, default=0.0) <= NEAR_TIE, f"answers differ at clear tokens: {gaps}"


def count(
    server: Server, prompts: Sequence[str], params: Sequence[dict[str, Any]], tokens: int
) -> Passes:
    """Count the passes for 2 * SLOTS requests that take `params` in turn."""
    before = passes_of(server)
    ask(server, prompts, params, tokens)
    return passes_of(server).since(before)


def ask(
    server: Server,
    prompts: Sequence[str],
    params: Sequence[dict[str, Any]],
    tokens: int,
    **more: Any,
) -> list[dict[str, Any]]:
    """The answers to 2 * SLOTS requests that take `params` in turn; `more` fields of the body."""
    texts = list(islice(cycle(prompts), 2 * SLOTS))
    asked = [{"max_new_tokens": tokens, **one} for one in islice(cycle(params), len(texts))]
    answers: list[dict[str, Any]] = server.post(
        "/generate", {"text": texts, "sampling_params": asked, **more}
    )
    return answers


def compare(server: Server, prompts: Sequence[str], tokens: int) -> tuple[float, list[float]]:
    """Compare greedy answers with and without drafts; rounding in bfloat16 may change some.

    Returns the share of equal answers, and for each other one the difference of the two largest log
    probabilities at its first token that differs.
    """
    drafted = ask(server, prompts, [GREEDY], tokens)
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    plain = ask(server, prompts, [{**GREEDY, **OFF}], tokens, **asked)
    gaps = []
    for ours, theirs in zip(drafted, plain, strict=True):
        pairs = zip(ours["output_ids"], theirs["output_ids"], strict=False)
        place = next((n for n, (own, other) in enumerate(pairs) if own != other), None)
        if place is not None:
            (first, *_), (second, *_) = theirs["meta_info"]["output_top_logprobs"][place][:2]
            gaps.append(first - second)
    return 1.0 - len(gaps) / len(plain), gaps


def table(found: Mapping[str, Passes], options: Options, prefix: str) -> Table:
    columns = {
        "requests": lambda row: row[0],
        "passes": lambda row: row[1].total,
        "outside graphs": lambda row: row[1].eager,
    }
    note = "" if options.on_gpu else "On a CPU, stand-ins call what a graph would replay."
    return Table.of(
        f"Passes in CUDA graphs, {prefix or 'default '}server", found.items(), columns, note
    )
