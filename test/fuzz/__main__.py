"""Fuzzes one end of the link for a number of frames; `scripts/fuzz` runs both ends.

    python -m test.fuzz to_sidecar --frames 1000000
    python -m test.fuzz from_sidecar --frames 1000000 --guided --corpus folder

`to_sidecar` fuzzes the sidecar's end: codec, loop and drafter. `from_sidecar` fuzzes the server's
end: codec, sidecar client, speculator and tries. With `--guided`, atheris (libFuzzer; install it
first) varies the runs in the corpus folder and adds those that reach new code. Otherwise the fuzzer
varies the runs of a pool at random; the pool starts with the runs in the folder, if one is given.
The last line of output has the figures. A run that fails is written to a file, and `--replay FILE`
repeats it.

Only the random fuzzer checks memory. Under atheris itself the process grows by about 10 KB per run;
the same runs without atheris do not grow it.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

MOST_BYTES = 12_000
"""Maximum bytes of one run, about 150 frames."""
MOST_GROWTH = 192 << 20
"""Maximum growth of the process's memory after the first tenth of the frames, in bytes."""
POOL = 512
"""Number of runs in the pool of the random fuzzer."""


class Fuzz:
    """One end of the link with its figures, for either fuzzer."""

    def __init__(self, target: str, frames: int, crashes: Path, *, guided: bool) -> None:
        # These imports come after atheris has instrumented the package.
        from test.engine.chaos import VOCAB as SERVER_VOCAB
        from test.fuzz.frames import Frames, unpack, vary
        from test.fuzz.server_end import TEXT_LEN, ServerEnd
        from test.fuzz.sidecar_end import CONTEXT, SidecarEnd
        from test.fuzz.sidecar_end import VOCAB as SIDECAR_VOCAB

        self._target = target
        self._wanted = frames
        self._crashes = crashes
        self._guided = guided
        self._unpack, self._vary = unpack, vary
        self._rng = random.Random()
        self._ends: list[SidecarEnd] | list[ServerEnd]
        if target == "to_sidecar":
            self._ends = [
                SidecarEnd(share=share, apart=apart, check_every=8)
                for share in (False, True)
                for apart in (False, True)
            ]
            drawn = Frames(self._rng, SIDECAR_VOCAB, CONTEXT - 10)
            self._fresh: Callable[[], bytes] = drawn.to_sidecar
        else:
            self._ends = [
                ServerEnd(check_every=16, serve_out=False),
                ServerEnd(check_every=16, serve_out=True),
            ]
            drawn = Frames(self._rng, SERVER_VOCAB, TEXT_LEN)
            self._fresh = drawn.from_sidecar
        self._began = time.monotonic()
        self._inputs = 0
        self._at_first: int | None = None
        self._peak = 0

    @property
    def frames(self) -> int:
        """Frames read so far."""
        return sum(end.frames for end in self._ends)

    @property
    def growth(self) -> int:
        """Largest growth of memory after the first tenth of the frames, in bytes."""
        return max(0, self._peak - (self._at_first or self._peak))

    @property
    def done(self) -> bool:
        return self.frames >= self._wanted

    def run(self, data: bytes) -> None:
        """Run `data` on one of the ends, chosen by its size."""
        # Serving requests to their end takes as long as a hundred frames, so only every 16th run
        # does it.
        end = self._ends[len(data) % len(self._ends)]
        if self._target == "from_sidecar":
            end = self._ends[len(data) % 16 == 0]
        try:
            end.run(self._unpack(data))
        except BaseException:
            name = self._crashes / f"{self._target}-{hashlib.sha1(data).hexdigest()[:12]}"
            name.write_bytes(data)
            print(f"fuzz: this run failed: {name}", flush=True)
            raise
        self._inputs += 1
        if self._inputs % 256 == 0 and not self._guided:
            self._measure()

    def vary(self, data: bytes, most_bytes: int, seed: int) -> bytes:
        """A variant of this run."""
        self._rng.seed(seed)
        return self._vary(data, self._rng, self._fresh, most_bytes)

    def report(self, corpus: int) -> str:
        malformed = sum(end.malformed for end in self._ends)
        figures = (
            f"{self.frames} frames ({malformed} malformed) in {self._inputs} runs and "
            f"{time.monotonic() - self._began:.0f} s, corpus of {corpus} runs"
        )
        if self._guided:
            return f"fuzz: {self._target} guided: {figures}"
        self._measure()
        growth = f"peak memory growth {self.growth / (1 << 20):.0f} MiB"
        return f"fuzz: {self._target} at random: {figures}, {growth}"

    def _measure(self) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        if self._at_first is None and self.frames >= self._wanted // 10:
            self._at_first = resident
        self._peak = max(self._peak, resident)
        if self.growth > MOST_GROWTH:
            raise MemoryError(f"memory grew by {self.growth} bytes; allowed are {MOST_GROWTH}")


def fuzz_at_random(fuzz: Fuzz, corpus: Path | None, seed: int) -> None:
    """Vary the runs of a pool; each variant replaces a run of the pool."""
    rng = random.Random(seed)
    pool = [b""] * POOL
    if corpus is not None:
        known = [file.read_bytes() for file in sorted(corpus.iterdir())]
        pool = [*rng.sample(known, min(len(known), POOL)), *pool][:POOL]
    while not fuzz.done:
        data = fuzz.vary(rng.choice(pool), MOST_BYTES, rng.getrandbits(32))
        fuzz.run(data)
        pool[rng.randrange(POOL)] = data
    print(fuzz.report(POOL), flush=True)


def fuzz_guided(start: Callable[[], Fuzz], corpus: Path, crashes: Path, seed: int) -> None:
    """Let libFuzzer vary the runs, guided by code coverage. Ends the process."""
    import atheris

    with atheris.instrument_imports(include=["sglang_qspec"]):
        fuzz = start()

    def run(data: bytes) -> None:
        fuzz.run(data)
        if fuzz.done:
            print(fuzz.report(sum(1 for _ in corpus.iterdir())), flush=True)
            os._exit(0)  # libFuzzer never returns

    def vary(data: bytes, most_bytes: int, seed: int) -> bytes:
        if seed % 8 == 0:
            mutated: bytes = atheris.Mutate(data, most_bytes)
            return mutated
        return fuzz.vary(data, most_bytes, seed)

    options = [f"-max_len={MOST_BYTES}", "-len_control=0", "-timeout=600", "-rss_limit_mb=8192"]
    options += [f"-artifact_prefix={crashes}/", f"-seed={seed}"]
    arguments = [sys.argv[0], *options, str(corpus)]
    atheris.Setup(arguments, run, custom_mutator=vary)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="test.fuzz", description=__doc__)
    parser.add_argument("target", choices=("to_sidecar", "from_sidecar"))
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--corpus", type=Path, help="folder of runs to begin with")
    parser.add_argument("--crashes", type=Path, default=Path(), help="folder for runs that failed")
    parser.add_argument("--replay", type=Path, help="repeat the run in this file")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)

    def start() -> Fuzz:
        return Fuzz(options.target, options.frames, options.crashes, guided=options.guided)

    if options.replay is not None:
        start().run(options.replay.read_bytes())
    elif options.guided:
        if options.corpus is None:
            parser.error("--guided needs a --corpus")
        options.corpus.mkdir(parents=True, exist_ok=True)
        fuzz_guided(start, options.corpus, options.crashes, options.seed)
    else:
        fuzz_at_random(start(), options.corpus, options.seed)


if __name__ == "__main__":
    main()
