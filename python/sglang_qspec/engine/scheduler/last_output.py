"""Ends each request when SGLang sends its last output, and attaches its speculation record.

This covers every request except those that SGLang aborts in the waiting queue. It also holds output
back that may be the beginning of a stop string.
"""

from __future__ import annotations

from typing import Any

from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.frontend.meta_info import KEY
from sglang_qspec.engine.scheduler import lifecycle, stop_strings


def output_streamer_class(streamer: type, scheduler: Any) -> type:
    """After `Scheduler.get_output_streamer_class`: a subclass that ends finished requests.

    SGLang calls this once, when the scheduler has its worker.
    """
    if speculation.active() is None:
        return streamer

    class OutputStreamer(streamer):
        has_additional_customized_info = True
        __slots__ = ()

        def stream_output(
            self, reqs: list[Any], return_logprob: bool, *args: Any, **kwargs: Any
        ) -> None:
            sent = stop_strings.without_begun(reqs)
            for req in sent if return_logprob else ():
                if req.return_logprob and req.sampling_params.max_new_tokens == 0:
                    # That of the token after the prompt, which SGLang lists with speculation only.
                    req.logprob.output_token_logprobs_val.clear()
                    req.logprob.output_token_logprobs_idx.clear()
            super().stream_output(sent, return_logprob, *args, **kwargs)

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            if speculation.active() is not None and any(req.finished() for req in reqs):
                with guarded("reporting finished requests"):
                    info[KEY] = [_record(req) for req in reqs]
            return info

    return OutputStreamer


def _record(req: Any) -> list[dict[str, Any]]:
    """End the request if it has finished. Returns a list with its record, or an empty list.

    It is a list because SGLang expects a list if the hook on `update_request_meta_info` fails.
    """
    tally = lifecycle.finished(req) if req.finished() else None
    return [] if tally is None else [tally.record()]
