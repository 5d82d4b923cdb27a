"""Checks and measures QSPEC on a GPU: `scripts/gpu-check`.

    scripts/gpu-check                      # all parts, on the GPU
    scripts/gpu-check kernels parity       # these parts
    scripts/gpu-check --emulate            # on a CPU, with servers that pass as GPU servers do
    scripts/gpu-check --emulate kernels    # on a CPU: this part
    scripts/gpu-check --bundle FOLDER      # collect the files for a machine without a network

The parts take at most 20 minutes, without the time in which the first servers compile kernels.
Writes results.json, table.md and a log of each part to --output. The last line is JSON: `failed`
(names of parts, or of their checks), `eager_passes` (passes of the target outside CUDA graphs),
`identical` (greedy answers with and without QSPEC), and `skipped`. The exit status is 0 only if
`failed` is empty.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmark.gpu_check import bundle
from benchmark.gpu_check.check import check, failures, summary
from benchmark.gpu_check.findings import Options
from benchmark.gpu_check.page import page
from benchmark.gpu_check.parts import BY_NAME, PARTS
from benchmark.harness import standin
from benchmark.harness.machine import provenance
from benchmark.harness.options import parser_of, positive, words
from benchmark.harness.output import say, write

MINUTES = 20


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.bundle is not None:
        return bundle.collect(options.bundle, options.have)
    # SIGTERM then raises KeyboardInterrupt, so that the running part is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = options.output or Path(tempfile.mkdtemp(prefix="gpu-check_"))
    chosen = Options("cpu" if options.emulate else "cuda", options.emulate, options.flags)
    if chosen.on_gpu and (error := standin.import_error()) is not None:
        say(f"gpu-check: torch stands in for sgl_kernel, which does not load: {error}")
        flags = (*standin.FLAGS, *options.flags)
        chosen = Options(chosen.device, chosen.emulated, flags)
    began = time.monotonic()
    found = check(options.parts, chosen, 60.0 * options.minutes, folder.absolute())
    seconds = round(time.monotonic() - began, 1)
    place = {"emulated": chosen.emulated, "flags": chosen.flags, "seconds": seconds}
    record = {**summary(found), **place, **provenance()}
    whole = {**record, "reasons": failures(found), "parts": msgspec.to_builtins(found)}
    for each in found.values():
        for table in each.tables:
            print(f"\n{table.text()}")
    write(folder, whole, ())
    (folder / "table.md").write_text(page(found, record), encoding="utf-8")
    print(f"\nresults: {folder}")
    print(json.dumps({**record, "results": str(folder)}))
    return int(bool(record["failed"]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("gpu_check", __doc__, {part.name: part.text for part in PARTS})
    parser.prog = "scripts/gpu-check"
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="parts to run (default: all)")
    add("--emulate", action="store_true", help="on a CPU, what needs no GPU and takes minutes")
    add("--minutes", type=positive, default=MINUTES, help=f"total limit (default: {MINUTES})")
    add("--output", type=Path, help="folder of the results (default: a new temporary folder)")
    add("--flags", type=words, default=(), help="more flags of every server, as --flags='--a b'")
    add("--bundle", type=Path, metavar="FOLDER", help="collect the files to carry, with sizes")
    add("--have", type=Path, help="with --bundle: `pip freeze` of the machine without a network")
    options = parser.parse_args(argv)
    unknown = [name for name in options.parts if name not in BY_NAME]
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}; allowed are {', '.join(BY_NAME)}")
    if not (options.emulate or options.bundle) and shutil.which("nvidia-smi") is None:
        parser.error("no GPU was found (nvidia-smi); --emulate runs what needs none")
    return options


if __name__ == "__main__":
    sys.exit(main())
