"""What limits the scale of a plan, from the sizes of the messages."""

from __future__ import annotations

import json

from sglang_qspec.link.frame import encode
from sglang_qspec.messages import Commit, Commits, Drafted, Submit
from sglang_qspec.tools.plan.planner import Plan
from sglang_qspec.tools.plan.trace import Trace
from sglang_qspec.tools.table import counted

SUBMISSION, TOKEN = 100_000, 100_000
"""A typical submission number and token id, which msgpack encodes in five bytes each."""
LOOKAHEAD = 16
FRAME = 80
"""Bytes of ZMQ, TCP and IP around a message."""
PROMPT_BYTES = 5
"""Bytes of JSON for a prompt token: four characters of text, and escapes."""


def commits_bytes(requests: int, tokens: int) -> int:
    """Bytes of the report of a pass: `tokens` new output tokens of each of `requests`."""
    commit = Commit(SUBMISSION, 500, [TOKEN] * tokens, LOOKAHEAD)
    return FRAME + len(encode(Commits([commit] * requests), 1 << 30))


def drafted_bytes() -> int:
    """Bytes of the message with one draft token."""
    return FRAME + len(encode(Drafted(SUBMISSION, 64, 500, 3, [TOKEN], known_len=500)))


def submit_bytes(prompt: int) -> int:
    """Bytes of the message with a prompt of `prompt` tokens."""
    return FRAME + len(encode(Submit(SUBMISSION, [TOKEN] * prompt, 0, 512, 8, 0.6), 1 << 30))


def chunk_bytes() -> int:
    """Bytes of a streamed chunk of an OpenAI chat completion with about four tokens of text."""
    delta = {"role": None, "content": " of the next pass", "reasoning_content": None}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    names = {"id": "0" * 32, "object": "chat.completion.chunk", "created": 1, "model": "model"}
    return FRAME + len("data: \n\n") + len(json.dumps({**names, "choices": [choice]}))


def lines_of(plan: Plan, trace: Trace, gbit: float) -> list[str]:
    """What limits more targets, a sentence each. `gbit` is the bandwidth of a sidecar's link."""
    found, group, prompt = plan.figures, plan.group, trace.mean_prompt
    requests = plan.rate * found.requests / found.tokens
    pieces = requests * found.passes * found.batch / found.requests
    to_clients = (pieces * chunk_bytes() + requests * prompt * PROMPT_BYTES) / 1e6
    router = (
        f"Router: {requests:.0f} requests/s and {pieces:.0f} streamed chunks/s of "
        f"{chunk_bytes()} bytes, {to_clients:.1f} MB/s in all."
    )
    if not plan.sidecars:
        return [router]
    share = found.sidecar_busy
    sizes = f"{drafted_bytes()} bytes for a draft token"
    link = found.drafted * drafted_bytes() + found.requests * submit_bytes(round(prompt))
    fed = counted(group.targets, "target")
    load = f"Sidecar: it drafts {100 * share:.0f} % of the time for {fed}"
    if group.pipeline == "queue":
        most = f"about {group.targets / share:.0f}" if share else "any number of"
        load += f", so it is saturated with {most} targets"
    else:  # the target reports its passes for step drafts alone
        commits = commits_bytes(max(1, round(found.batch)), max(1, round(found.tokens_per_pass)))
        sizes += f", {commits} for the report of a pass"
        link += found.passes * commits
    rate = link / found.requests * requests / plan.targets
    return [
        f"{load}.",
        f"Link: a target takes {rate / 1e6:.2f} MB/s ({sizes}), so {gbit:g} Gbit/s hold "
        f"{int(gbit * 1e9 / 8 / rate)} targets.",
        router,
    ]
