"""Checks the trace of an answer against its tokens, its labels and its record."""

from typing import Any

from test.engine.server.running import GREEDY

TRACED = {"qspec_return_trace": True}
BOTH = {**TRACED, "qspec_return_provenance": True}
NARROW = {"qspec_draft_token_num": 2}
"""For answers of many passes: SGLang may stream the tokens of several passes at once."""
FIELDS = ["start", "tokens", "rows", "batch_requests", "batch_rows", "ms", "pipeline"]
LISTS = {"ids", "texts", "parents", "sources", "chances", "accepted"}


def body_of(text: Any, **sampling: Any) -> dict[str, Any]:
    """The body of a greedy request to /generate with a trace and labels."""
    custom = {**BOTH, **sampling.pop("custom_params", {})}
    return {"text": text, "sampling_params": {**GREEDY, "custom_params": custom, **sampling}}


def check_trace(answer: dict[str, Any], *, prefills: int = 1) -> list[dict[str, Any]]:
    """Fail unless the trace agrees with the answer, which has labels too. Returns the passes.

    `prefills` is the number of tokens from passes over the prompt.
    """
    meta, output_ids = answer["meta_info"], answer["output_ids"]
    trace = meta["qspec_trace"]
    assert list(trace) == ["version", "passes", "omitted_passes"]
    assert trace["version"] == 1
    assert trace["omitted_passes"] == 0
    passes: list[dict[str, Any]] = trace["passes"]
    assert sum(one["tokens"] for one in passes) == meta["completion_tokens"] - prefills
    end = 0
    for one in passes:
        assert one["start"] >= end
        end = one["start"] + one["tokens"]
        check_pass(
            one, output_ids[one["start"] : end], meta["qspec_provenance"][one["start"] : end]
        )
    assert end <= len(output_ids)
    if "qspec" in meta:
        check_record(passes, meta["qspec"])
    return passes


def check_pass(one: dict[str, Any], output_ids: list[int], labels: list[str]) -> None:
    """Fail unless a pass gave these tokens with these labels."""
    assert list(one) == [*FIELDS, "match", "tree"]
    tree = one["tree"]
    assert set(tree) == LISTS
    assert {len(values) for values in tree.values()} == {one["rows"] - 1}
    assert all(-1 <= parent < node for node, parent in enumerate(tree["parents"]))
    assert one["batch_rows"] >= one["rows"] + one["batch_requests"] - 1
    assert one["ms"] > 0
    assert one["pipeline"] in ("queue", "halves", "ahead")
    path = [node for node, accepted in enumerate(tree["accepted"]) if accepted]
    assert [tree["parents"][node] for node in path] == [-1, *path][: len(path)]
    assert [tree["ids"][node] for node in path] == output_ids[: len(path)]
    own = len(output_ids) - len(path)
    assert own in (0, 1)  # a stop may have dropped the target's own token
    assert labels == [tree["sources"][node] for node in path] + ["target"] * own
    for chance, parent in zip(tree["chances"], tree["parents"], strict=True):
        assert 0 < chance <= (1 if parent < 0 else tree["chances"][parent])
    if tree["ids"]:
        assert 1 <= one["match"]["length"] <= 32


def check_record(passes: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Fail unless the passes add up to `meta_info.qspec`."""
    assert len(passes) == record["passes"]
    assert sum(one["rows"] - 1 for one in passes) == record["proposed_tokens"]
    assert sum(sum(one["tree"]["accepted"]) for one in passes) == record["accepted_tokens"]
