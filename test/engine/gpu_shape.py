"""Lets a server on a CPU pass as a GPU server does, through a second plugin.

- Verify passes have one width, 8 at most by default, and replay graphs of a captured width and
  batch size (`called_graphs`). All batches up to 16 requests have a graph.
- SGLang's overlap scheduler is on.
- Sampling computes all rows and all branches alike, and ranks the whole vocabulary where filters
  may need it.
- The sidecar runs all kinds of work in one pass, draws the tokens of several decode passes before
  it reads them, and keeps the table of its KV slots on the host and on the device.

A CPU cannot show what work on the device and on the host overlaps in time, the kernels of a GPU,
masks over prefixes, and pinned copies. Prefills have no graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from test.engine.awaiting_plugin import wrap

GPU_SHAPE = """
    from test.engine import gpu_shape

    gpu_shape.install()
"""
"""Lines for the end of a plugin's function `load`."""
BATCHES = (1, 2, 4, 8, 16)
"""Batch sizes with graphs, up to the number of running requests. Other batches are padded."""


def install() -> None:
    """Change the defaults and the kernels of this process."""
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_qspec.engine.passes.launch import tree_attention
    from sglang_qspec.engine.passes.states import TargetStates
    from sglang_qspec.engine.start import arguments
    from sglang_qspec.sidecar.burst import MOST_BURSTS, MOST_PASSES
    from sglang_qspec.sidecar.drafter import Drafter
    from sglang_qspec.sidecar.kv_rows import KVRows
    from sglang_qspec.verify import rows

    def schedule(sound: Callable[..., Any], *given: Any, **named: Any) -> None:
        _capture()
        sound(*given, **named)

    def draft(sound: Callable[..., Any], *given: Any, **named: Any) -> None:
        on_gpu = {"apart": False, "most_passes": MOST_PASSES, "most_bursts": MOST_BURSTS}
        sound(*given, **named | on_gpu)

    def take_states(sound: Callable[..., Any], self: Any, rows: int, *, replayed: bool) -> Any:
        if replayed:
            self.begin()  # a replay of a GPU runs no Python
        return sound(self, rows, replayed=replayed)

    def keep(sound: Callable[..., Any], self: Any, *given: Any) -> None:
        sound(self, *given)
        self._shares, self._slots = False, np.zeros(self.table.shape, np.int32)

    arguments.OVERLAPS.add("cpu")
    arguments.DRAFT_TOKENS["cpu"] = arguments.DRAFT_TOKENS["cuda"]
    uniform = tree_attention.Verification(ragged=False, can_change=False, chains=False)
    wrap(tree_attention, "verification_of", lambda _sound, *_: uniform)
    wrap(rows, "picks", lambda _sound, _mask: False)
    wrap(Scheduler, "__init__", schedule)
    wrap(Drafter, "__init__", draft)
    wrap(KVRows, "__init__", keep)
    wrap(TargetStates, "take", take_states)


def _capture() -> None:
    """Let the scheduler of this process capture graphs, if it has QSPEC."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec, get_schedule, get_spec

    from sglang_qspec.config import ALGORITHM
    from test.engine.cuda import called_graphs

    if get_spec().speculative_algorithm != ALGORITHM:
        return
    called_graphs.install()
    decode = get_exec().graph.cuda_graph_config.decode
    most = get_schedule().max_running_requests
    decode.bs = [size for size in BATCHES if size < 2 * most]
    decode.max_bs, decode.backend = max(decode.bs), Backend.FULL
