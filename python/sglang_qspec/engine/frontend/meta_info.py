"""What a finished request says of its speculation: `meta_info["qspec"]` and the spec_* figures.

The scheduler's side attaches one record to a request's last output; the side that serves clients
puts it into `meta_info` and corrects the figures that SGLang derives from a constant width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_qspec.engine.failsafe import guarded
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.requests import speculator

KEY = "qspec"


def output_streamer_class(streamer: type, scheduler: Any) -> type:
    """After `Scheduler.get_output_streamer_class`: one that adds the record to last outputs.

    Called once, when the scheduler has its worker.
    """
    if speculator.active() is None:
        return streamer

    class OutputStreamer(streamer):
        has_additional_customized_info = True
        __slots__ = ()

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            active = speculator.active()
            if active is not None and any(req.finished() for req in reqs):
                with guarded("a request was reported"):
                    info[KEY] = [_last_record(active, req) for req in reqs]
            return info

    return OutputStreamer


def _last_record(active: speculator.Speculator, req: Any) -> list[dict[str, Any]]:
    """The record of a request that ends here and was speculated for, otherwise nothing.

    A list, as SGLang would gather it if our hook on `update_request_meta_info` failed.
    """
    if not req.finished():
        return []
    tally = active.end(req.rid, len(req.output_ids_through_stop))
    return [] if tally is None else [tally.record()]


def complete_meta_info(
    update: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list[Any]],
    index: int,
    *args: Any,
) -> None:
    """Around `TokenizerManager.update_request_meta_info`, which gathers one item a token.

    Our record is none of these, and a request without provenance has none to show.
    """
    others = {key: values for key, values in customized_info.items() if key != KEY}
    whose = others.get(provenance.KEY)
    known = provenance.KEY in state.customized_info_reported_keys
    if whose is not None and not known and provenance.is_others(whose[index]):
        del others[provenance.KEY]
    update(manager, meta_info, state, others, index, *args)
    records = customized_info.get(KEY)
    if records is not None and records[index]:
        (meta_info[KEY],) = records[index]


def correct_rates(result: None, manager: Any, meta_info: dict[str, Any], *args: Any) -> None:
    """After `TokenizerManager._calculate_spec_decoding_metrics`, which assumes a constant width."""
    record = meta_info.get(KEY)
    if not isinstance(record, dict):
        return
    proposed, accepted = record["proposed_tokens"], record["accepted_tokens"]
    if "spec_num_proposed_drafts" in meta_info:
        meta_info["spec_num_proposed_drafts"] = proposed
        meta_info["spec_num_correct_drafts"] = accepted
        meta_info["spec_accept_rate"] = accepted / proposed if proposed else 0.0
