"""Opens the speculator of a worker, with its tries and its links to the sidecars."""

from __future__ import annotations

from sglang.srt.managers.tp_worker import TpModelWorker

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.requests.runtime_settings import RuntimeSettings
from sglang_qspec.engine.sidecar.startup import open_links
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.trie import TrieLimits, TrieStore


def speculator_of(
    settings: QSpecConfig, runtime: RuntimeSettings, gpu_id: int, target_worker: TpModelWorker
) -> Speculator:
    """The speculator of a worker. Raises LinkError if a sidecar refuses this target."""
    vocab_size = target_worker.model_config.vocab_size
    limits = TrieLimits(
        vocab_size=vocab_size,
        max_request_tokens=settings.max_request_tokens,
        max_total_tokens=settings.max_total_tokens,
    )
    opened = open_links(settings, gpu_id)
    return Speculator(settings, vocab_size, TrieStore(limits), opened, runtime_settings=runtime)
