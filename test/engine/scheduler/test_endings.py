"""An answer ends at the right token of an accepted run, also if the search for the end fails."""

import contextlib
import inspect
import signal
import threading
import time
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_qspec.engine.scheduler import endings
from sglang_qspec.engine.scheduler.search_limit import (
    SECONDS,
    SearchTooLongError,
    search_limit,
)
from sglang_qspec.tools.models import DemoModels


@pytest.fixture(scope="module")
def tokenizer(models: DemoModels) -> Any:
    return get_tokenizer(str(models.target))


def request(tokenizer: Any, text: str, **stops: Any) -> Req:
    """A request with two stop strings; one pass has just added all of `text` to its output."""
    params = SamplingParams(max_new_tokens=99, **(stops or {"stop": [" d", " b"]}))
    params.normalize(tokenizer)
    params.verify(vocab_size=len(tokenizer))
    req = Req("r", "", [5], params, vocab_size=len(tokenizer))
    req.tokenizer = tokenizer
    req.output_ids.extend(tokenizer.encode(text))
    return req


TEXT = " a b c d e"


def test_the_first_end_in_an_accepted_run_counts(tokenizer: Any) -> None:
    req = request(tokenizer, TEXT)
    accepted = list(req.output_ids)
    endings.update_finish_state(type(req).update_finish_state, req, len(accepted))
    assert req.finished_reason.matched == " b"
    assert req.finished_len == 2
    assert list(req.output_ids) == accepted


def test_an_aborted_answer_has_one_token_of_the_last_run(tokenizer: Any) -> None:
    """As without drafts, no token after a stop or `max_new_tokens` is sent."""
    req = request(tokenizer, TEXT)
    before, run = req.output_ids[:2], req.output_ids[2:]
    req.to_finish = FINISH_ABORT()
    endings.update_finish_state(type(req).update_finish_state, req, len(run))
    assert isinstance(req.finished_reason, FINISH_ABORT)
    assert req.output_ids_through_stop == before + run[:1]


@pytest.mark.parametrize("failing_call", [2, 3])
def test_an_error_in_the_search_leaves_sglangs_own_end_and_the_whole_output(
    tokenizer: Any, failing_call: int
) -> None:
    req = request(tokenizer, TEXT)
    grammar = req.grammar = object()
    accepted = list(req.output_ids)
    calls = 0
    # Another test may have loaded the plugin, which wraps it.
    sglangs_own = inspect.unwrap(Req.update_finish_state)

    def update(req: Req, new_accepted_len: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise KeyError("a fault")
        sglangs_own(req, new_accepted_len)

    with pytest.raises(KeyError):
        endings.update_finish_state(update, req, len(accepted))
    assert req.finished_reason.matched == " d"
    assert req.finished_len == 4
    assert list(req.output_ids) == accepted
    assert req.grammar is grammar


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", r"(\w+\s?)+\d", "(aa|a+)+b"])
@pytest.mark.parametrize("run", [1, 4])
def test_a_search_without_end_ends_its_request(tokenizer: Any, pattern: str, run: int) -> None:
    """The time of these searches doubles with each character of output."""
    req = request(tokenizer, "a" * 80 + "!", stop_regex=pattern)
    output = list(req.output_ids)
    endings.update_finish_state(inspect.unwrap(Req.update_finish_state), req, run)
    reason = req.finished_reason.to_json()
    assert reason["status_code"] == 400
    assert repr(pattern)[1:-1] in reason["message"]
    assert list(req.output_ids) == output
    assert req.finished_len == len(output)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_an_ordinary_pattern_meets_no_limit(tokenizer: Any) -> None:
    req = request(tokenizer, TEXT, stop_regex=" [xc] ?")
    del req.output_ids[2:]
    update = inspect.unwrap(Req.update_finish_state)
    for _ in range(200):
        endings.update_finish_state(update, req, 2)
        assert not req.finished()
    req.output_ids.extend(tokenizer.encode(" c d e"))
    endings.update_finish_state(update, req, 3)
    assert req.finished_reason.matched == " [xc] ?"
    assert req.finished_len == 3


def test_another_thread_searches_without_a_limit(tokenizer: Any) -> None:
    req = request(tokenizer, TEXT, stop_regex="b")
    update = inspect.unwrap(Req.update_finish_state)
    thread = threading.Thread(target=endings.update_finish_state, args=(update, req, 5))
    thread.start()
    thread.join()
    assert req.finished_reason.matched == "b"


def test_no_signal_comes_after_a_search() -> None:
    """The searches end close to the limit, so that signals arrive at all moments."""
    for number in range(24):
        with contextlib.suppress(SearchTooLongError), search_limit():
            end = time.thread_time() + SECONDS + (number - 12) * 1e-4
            while time.thread_time() < end:
                pass
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    end = time.thread_time() + 2 * SECONDS
    while time.thread_time() < end:
        pass
