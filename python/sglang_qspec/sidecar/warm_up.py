"""First passes of a loaded draft model, before the sidecar serves.

The first pass of a size allocates memory, and may compile kernels. The passes also tell the servers
how long a draft step and the reading of a prompt take, so that they can predict whether step drafts
pay before they give the sidecar their cores for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from sglang_qspec.errors import DraftModelError
from sglang_qspec.messages import SeededSampling
from sglang_qspec.sidecar.burst import Drawing
from sglang_qspec.sidecar.draft_kv import DraftKV
from sglang_qspec.sidecar.sampler import Sampler
from sglang_qspec.sidecar.sampling import GREEDY

logger = logging.getLogger(__name__)

TIMED = 3
"""Number of timed passes of each size, after one that is not timed."""
MOST_S = 2.0
"""Seconds after which no further size begins."""
READ = 64
"""Number of prompt tokens of the pass that tells how long reading takes."""
FIRST, SECOND = 0, 1
"""Token ids that the passes read; every vocabulary has them."""
SAMPLINGS = (
    GREEDY,
    SeededSampling(seed=0, temperature=1.0),
    SeededSampling(seed=0, temperature=1.0, top_k=2),
)
"""Samplings that need kernels of their own."""


def step_seconds(
    model: DraftKV, slots: int, clock: Callable[[], float] = time.perf_counter
) -> list[tuple[int, float]]:
    """Run decode passes over 1, 2, 4, ... rows up to `slots`, and return (rows, seconds) of each.

    The seconds are the shortest of `TIMED` passes: other processes may start at the same time. The
    list ends early if the KV is too small or the time is over, and where a pass fails; what the
    sidecar does about a model that fails is the matter of its loop.
    """
    found: list[tuple[int, float]] = []
    began = clock()
    for rows in _sizes(model, slots):
        if clock() - began > MOST_S:
            break
        try:
            found.append((rows, _fastest(model, rows, clock)))
        except (DraftModelError, RuntimeError) as error:  # torch raises RuntimeError
            logger.warning("A pass over %d rows failed before the first request: %s", rows, error)
            break
    return found


def read_seconds(model: DraftKV, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds for which a token of a prompt is read, from one pass; 0 if there is no such pass."""
    if not model.rows.free_rows or model.rows.free_slots < READ:
        return 0.0
    row = model.rows.open()
    try:
        began = clock()
        model.extend([row], [[FIRST] * READ])
        return (clock() - began) / READ
    except (DraftModelError, RuntimeError) as error:  # torch raises RuntimeError
        logger.warning("A pass over a prompt failed before the first request: %s", error)
        return 0.0
    finally:
        model.rows.close(row)


def _sizes(model: DraftKV, slots: int) -> Iterator[int]:
    """The numbers of rows for which the KV has room, in rising order."""
    rows, each = 1, TIMED + 2
    while rows <= min(slots, model.rows.free_rows) and rows * each <= model.rows.free_slots:
        yield rows
        rows *= 2


def _fastest(model: DraftKV, count: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest decode pass over this number of rows."""
    rows = [model.rows.open() for _ in range(count)]
    none = [0] * count
    seconds: list[float] = []
    try:
        logits = model.extend(rows, [[FIRST]] * count)
        for sampling in SAMPLINGS:
            Sampler([sampling] * count, none, none).choose(logits)
        for _ in range(TIMED + 1):
            began = clock()
            sampler = Sampler([GREEDY] * count, none, none)
            drawing = Drawing(model, rows, [SECOND] * count, [1] * count, sampler)
            drawing.run()
            drawing.read()
            seconds.append(clock() - began)
    finally:
        for row in rows:
            model.rows.close(row)
    return min(seconds[1:])
