"""Measures how many tokens one sidecar drafts for several servers, without targets.

The tenants are servers at the protocol level: each keeps some requests at the sidecar, and submits
the next one when all drafts of a request have arrived. Each tenant has its own connection. The
sidecar runs its real loop, link and drafter, once with the real draft model and once with a model
that answers at once. The second shows the limit of link and loop. The sidecar is a process on
`--cores`, and all tenants share one process on `--tenant-cores`. Numbers of tenants take turns.

    python -m benchmark.bench_fleet

The last line is JSON: `rows` and the conditions. A row has, for one model and number of tenants,
`tokens_per_s` with its spread, `over_one`, `request_ms`, `fairness`, `received_per_s`, `declined`,
the shares of the loop's time in `model_share`, `sampling_share`, `link_share`, `drafter_share` and,
without requests, `idle_share`, and the CPU time of both processes per second in `sidecar_cpu` and
`tenants_cpu`.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmark.fleet.serving import DRAFT, INSTANT, sidecar
from benchmark.fleet.summary import Figures, summarize, table
from benchmark.harness.child import Child, pin
from benchmark.harness.options import parser_of, positive
from benchmark.harness.output import print_record, say

WARM_UP_S = 2.0
"""Seconds to connect all tenants and fill the passes, before the measurement."""


def main() -> None:
    options = parse()
    if options.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if options.model_path is None and options.tenants:
        from sglang_qspec.tools.models import demo_models

        options.model_path = str(demo_models(on_cuda=options.device != "cpu").draft)
    pin(options.tenant_cores)
    # Each measurement ends with a sidecar that closes its connections.
    logging.getLogger("sglang_qspec.link").setLevel(logging.ERROR)
    rows = [
        *measure(DRAFT, options.tenants, options),
        *measure(INSTANT, options.instant_tenants, options),
    ]
    title = (
        f"Drafted tokens/s: {options.in_flight} requests of each tenant at once, prompts of "
        f"{options.prompt} tokens, {options.completions} completions of {options.tokens} tokens"
    )
    print(table(title, rows).text())
    names = ("in_flight", "prompt", "completions", "tokens", "seconds", "rounds", "dtype", "device")
    conditions = {name: getattr(options, name) for name in names}
    cores = {"cores": options.cores, "tenant_cores": options.tenant_cores}
    print_record({"rows": rows, **conditions, **cores})


def measure(model: str, tenants: Sequence[int], options: argparse.Namespace) -> list[Figures]:
    """Measure the numbers of tenants with one model, in turn."""
    from benchmark.fleet.tenants import Demand, run
    from sglang_qspec.link import PrivateEndpoint

    if not tenants:
        return []
    demand = Demand(options.in_flight, options.prompt, options.tokens, options.completions)
    runs: dict[tuple[str, int], list[dict[str, float]]] = {(model, n): [] for n in tenants}
    with Child(sidecar, model, options) as child, ThreadPoolExecutor(1) as asking:
        for number in range(options.rounds):
            for count in tenants:
                with PrivateEndpoint() as endpoint:
                    question = (endpoint.address, WARM_UP_S, options.seconds)
                    if number == 0 and count == tenants[0]:
                        say(f"{model}: loading")
                        child.ask((endpoint.address, 0.0, 0.1))  # loads the model
                    answer = asking.submit(child.ask, question)
                    found = run(
                        endpoint.address, count, demand, WARM_UP_S, options.seconds, answer.done
                    )
                    runs[model, count].append({**found, **answer.result()})
                say(f"{model}, {count} tenants: {runs[model, count][-1]['tokens_per_s']:.0f}/s")
    return summarize(runs)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ends the process with a message if one is not allowed."""
    parser = parser_of("bench_fleet", __doc__)
    add = parser.add_argument
    add("--model-path", help="draft model (default: the demo model's)")
    add("--dtype", default="bfloat16")
    add("--device", default="cpu")
    add("--cores", default="1", help="processors of the sidecar, such as 0-3 (default: 1)")
    add("--tenant-cores", default="0", help="processors of the tenants (default: 0)")
    add("--tenants", type=positive, nargs="*", default=[1, 2, 4, 8], help="with the draft model")
    add("--instant-tenants", type=positive, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    add("--in-flight", type=positive, default=4, help="requests of each tenant (default: 4)")
    add("--prompt", type=positive, default=64, help="tokens of a prompt (default: 64)")
    add("--completions", type=positive, default=2, help="for each request (default: 2)")
    add("--tokens", type=positive, default=32, help="tokens of a completion (default: 32)")
    add("--seconds", type=positive, default=8, help="of each measurement (default: 8)")
    add("--rounds", type=positive, default=3, help="figures are medians (default: 3)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
