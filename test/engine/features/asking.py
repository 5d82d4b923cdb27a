"""Asks a server with drafts and without, and compares the answers."""

from collections.abc import Sequence
from typing import Any

from benchmark.harness.server import Server

TEXT = "Once upon a time, in a small village by the sea,"
PLAIN = {"qspec_enabled": False}
"""Custom parameters of a request that is decoded without drafts."""
NOISE = [[17, 4242, 300], [49151, 0, 2]]
"""Wrong guesses, some with special tokens."""


def ask(server: Server, sampling: dict[str, Any], **body: Any) -> Any:
    """The answer, or answers, to one call of /generate; greedy by default."""
    given = {"sampling_params": {"temperature": 0, **sampling}}
    prompt = {} if "input_ids" in body else {"text": TEXT}
    return server.post("/generate", {**prompt, **given, **body})


def guessing(output_ids: Sequence[int]) -> dict[str, Any]:
    """Custom parameters with guesses: `output_ids`, a text that diverges from it, and noise."""
    guesses = [[*output_ids, *NOISE[0]], [*output_ids[: len(output_ids) // 2], *NOISE[1]], *NOISE]
    return {"qspec_guess_ids": [guess for guess in guesses if guess]}


def both(
    server: Server, sampling: dict[str, Any], guess: Sequence[int] | None = None, **body: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer without drafts, and an answer with `guess` (by default the first answer)."""
    extra = sampling.get("custom_params", {})
    plain = ask(server, {**sampling, "custom_params": {**extra, **PLAIN}}, **body)
    drafts = guessing(plain["output_ids"] if guess is None else guess)
    ours = ask(server, {**sampling, "custom_params": {**extra, **drafts}}, **body)
    return plain, ours


def check_same(plain: dict[str, Any], ours: dict[str, Any], *, accepted: bool = True) -> None:
    """Fail if the answers or their ends differ, or if `ours` has no accepted draft token."""
    for key in ("output_ids", "text"):
        assert ours[key] == plain[key]
    for key in ("finish_reason", "completion_tokens", "prompt_tokens"):
        assert ours["meta_info"][key] == plain["meta_info"][key]
    assert "qspec" not in plain["meta_info"]
    if accepted:
        assert ours["meta_info"]["qspec"]["accepted_tokens"] > 0
