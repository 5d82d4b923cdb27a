"""Labels each output token with its draft source or `target`, for requests that ask for it.

The list `meta_info["qspec_provenance"]` has one label for each output token. It is part of the
request's `customized_info`, which SGLang sends along with output tokens. SGLang cuts the list
together with the tokens, at stops and into streamed chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang_qspec.controls import PREFIX
from sglang_qspec.trie import DraftTrees, Source

KEY = "qspec_provenance"
TARGET = "target"
_LABELS = [source.name.lower() for source in Source]


def begin(req: Any, by_default: bool) -> None:
    """Start the list of a request that asks for labels; `by_default` applies without the option.

    A retracted request keeps its list.
    """
    asked = (req.sampling_params.custom_params or {}).get(PREFIX + "return_provenance", by_default)
    if asked and _labels_of(req) is None:
        req.customized_info = {**(req.customized_info or {}), KEY: []}


def extend(reqs: Sequence[Any]) -> None:
    """Label the target's token of a prefill; `_add` drops the label if more chunks follow."""
    for req in reqs:
        if (labels := _labels_of(req)) is not None:
            _add(labels, len(req.output_ids), ())


def record(
    reqs: Sequence[Any],
    trees: DraftTrees | None,
    accepted: Sequence[Sequence[int]],
    output_lens: Sequence[int],
) -> None:
    """Label the tokens of a pass: the `accepted` nodes of each tree, then the target's token.

    Without `trees` each request gets only the target's token. `output_lens` has the length of each
    request's output before the pass.
    """
    for row, req in enumerate(reqs):
        if (labels := _labels_of(req)) is not None:
            drafted = trees.sources[row, accepted[row]].tolist() if trees is not None else []
            _add(labels, output_lens[row], drafted)


def _add(labels: list[str], output_len: int, sources: Iterable[int]) -> None:
    """Append the labels of accepted draft tokens and of one token of the target.

    Labels of tokens that did not become output are dropped first, such as a prefill chunk's label.
    """
    del labels[output_len:]
    labels += [_LABELS[source] for source in sources]
    labels.append(TARGET)


def _labels_of(req: Any) -> list[str] | None:
    return req.customized_info.get(KEY) if req.customized_info else None


def is_padding(values: Sequence[str | None]) -> bool:
    """Whether a request has no list, and SGLang padded its place in the batch."""
    return not values or values[0] is None
