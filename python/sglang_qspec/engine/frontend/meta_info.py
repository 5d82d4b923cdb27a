"""Adds `meta_info["qspec"]` to finished requests, adds traces, and corrects the spec_* figures.

The scheduler attaches one record to the last output of a request (`engine.scheduler.last_output`).
In the process that serves clients, this module puts the record into `meta_info`. It also corrects
the figures that SGLang derives from a constant width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_qspec.engine.frontend import provenance, trace

KEY = "qspec"


def complete_meta_info(
    update: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list[Any]],
    index: int,
    finish_reason: dict[str, Any] | None,
) -> None:
    """Around `TokenizerManager.update_request_meta_info`, which collects one item per token.

    The hook hides QSPEC's record from SGLang, because the record is one item per request, and the
    trace, which has another form in an answer. It also removes the labels with which SGLang pads a
    request without provenance.
    """
    hidden = (KEY, trace.KEY)
    others = {key: values for key, values in customized_info.items() if key not in hidden}
    labels = others.get(provenance.KEY)
    known = provenance.KEY in state.customized_info_reported_keys
    if labels is not None and not known and provenance.is_padding(labels[index]):
        del others[provenance.KEY]
    update(manager, meta_info, state, others, index, finish_reason)
    records = customized_info.get(KEY)
    if records is not None and records[index]:
        (meta_info[KEY],) = records[index]
    if trace.KEY in customized_info:
        items = customized_info[trace.KEY][index]
        trace.add(meta_info, manager, state, items, finished=finish_reason is not None)


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
