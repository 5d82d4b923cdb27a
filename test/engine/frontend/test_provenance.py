"""Each output token gets one label, its draft source or `target`, also after retractions."""

from types import SimpleNamespace
from typing import Any

from sglang_qspec.engine.frontend import provenance
from sglang_qspec.trie import DraftTree, DraftTrees, Source


def request(**custom_params: Any) -> Any:
    """The part of SGLang's `Req` that the code reads."""
    params = SimpleNamespace(custom_params=custom_params or None)
    return SimpleNamespace(sampling_params=params, output_ids=[], customized_info=None)


def labels(req: Any) -> list[str]:
    found: list[str] = req.customized_info[provenance.KEY]
    return found


OUTPUT, QUEUE, STEP, GUESS = Source.OUTPUT, Source.QUEUE, Source.STEP, Source.GUESS
TREES = DraftTrees.of(
    [
        DraftTree((1, 2, 3), (0, 0, 1), (OUTPUT, QUEUE, STEP), (1.0, 0.9, 0.8)),
        DraftTree((1, 2), (0, 0), (OUTPUT, GUESS), (1.0, 0.9)),
    ],
    3,
)


def test_each_pass_adds_what_it_accepted_and_a_token_of_the_target() -> None:
    reqs = [request(qspec_return_provenance=True) for _ in range(2)]
    for req in reqs:
        provenance.begin(req, False)
    provenance.extend(reqs)
    assert [labels(req) for req in reqs] == [["target"], ["target"]]
    for req in reqs:
        req.output_ids = [1]
    provenance.record(reqs, TREES, [[1, 2], []], [1, 1])
    assert labels(reqs[0]) == ["target", "queue", "step", "target"]
    assert labels(reqs[1]) == ["target", "target"]


def test_a_chunked_prefill_adds_one_label_and_a_retracted_request_continues() -> None:
    req = request(qspec_return_provenance=True)
    provenance.begin(req, False)
    for _ in range(3):  # chunks of the prompt; only the last one gives a token
        provenance.extend([req])
    req.output_ids = [1]
    provenance.record([req], TREES, [[1, 2]], [1])
    req.output_ids = [1, 2, 3, 4]
    provenance.begin(req, False)  # retracted, and queued again
    provenance.extend([req])
    assert labels(req) == ["target", "queue", "step", "target", "target"]


def test_labels_of_tokens_that_did_not_become_output_are_removed() -> None:
    req = request(qspec_return_provenance=True)
    provenance.begin(req, False)
    provenance.extend([req])
    req.output_ids = [1]
    provenance.record([req], TREES, [[1, 2]], [1])
    req.output_ids = [1, 2]
    provenance.record([req], TREES, [[]], [2])
    assert labels(req) == ["target", "queue", "target"]


def test_labels_are_kept_for_tokens_that_sglang_has_not_added_yet() -> None:
    req = request(qspec_return_provenance=True)
    provenance.begin(req, False)
    provenance.extend([req])
    provenance.record([req], TREES, [[1, 2]], [1])
    provenance.record([req], TREES, [[]], [4])
    assert labels(req) == ["target", "queue", "step", "target", "target"]


def test_only_requests_that_ask_or_have_it_by_default_keep_a_list() -> None:
    silent, refusing, asking = request(), request(qspec_return_provenance=False), request()
    provenance.begin(silent, False)
    provenance.begin(refusing, True)
    provenance.begin(asking, True)
    provenance.extend([silent, refusing, asking])
    assert silent.customized_info is None
    assert refusing.customized_info is None
    assert labels(asking) == ["target"]


def test_customized_info_from_others_stays() -> None:
    req = request(qspec_return_provenance=True)
    req.customized_info = {"other": [1]}
    provenance.begin(req, False)
    assert req.customized_info == {"other": [1], provenance.KEY: []}
