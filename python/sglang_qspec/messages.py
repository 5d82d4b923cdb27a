"""All messages between a server and its sidecar.

    server  ->  sidecar     Hello, Submit, Admit, Commits, States, Close, Rest, Ping
    sidecar ->  server      Welcome, Refusal, Drafted, Gap, Declined, Heartbeat

Each message is a tagged msgspec struct, encoded as msgpack in one ZMQ frame. New fields are
appended, with a default. The type of a field states its bounds, which msgspec checks when it
decodes a message; `link/frame.py` checks the rest. Lengths are in tokens. A token id has the same
text for target and draft model, but either may have more ids than the other: models pad their
vocabularies differently.

`submission` identifies a request. The server assigns a new number to each Submit and never reuses
one, so a late draft for a closed submission cannot reach a later request. Client request ids are
not sent: they have any length and any characters, and a client may reuse them.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL = 2
"""Version of this schema. The handshake refuses any other."""

MAX_FROM_SIDECAR_BYTES = 64 << 10
"""Maximum size of a frame to a server, in bytes. The scheduler's thread decodes these frames."""
MAX_DRAFTED_TOKENS = 512
"""Maximum number of tokens in one `Drafted`; a longer draft is sent in several messages."""
MAX_DRAWN_TOKENS = 32
"""Maximum number of tokens in one `Drafted` that has `candidates`."""
MAX_CANDIDATES = 64
"""Maximum number of candidates sent with each token of a step draft."""
MAX_COMMITS = 256
"""Maximum number of requests in one `Commits`."""
MAX_COMMIT_TOKENS = 4096
"""Maximum number of tokens in one `Commit`; the rest follows in the next report."""
MAX_STATE_BYTES = 64 << 10
"""Maximum size of the hidden states in one `States`; further ones follow in the next message."""
MAX_LOOKAHEAD = 64
"""Maximum number of tokens that a step draft runs ahead of the committed output."""
MIN_TEMPERATURE = 1e-6
"""Lowest temperature other than 0. SGLang decodes greedily at a lower temperature."""
MAX_STOP_TOKENS = 1024
"""Maximum number of stop tokens in one `Submit`; the server omits any further stop tokens."""
MAX_SUBMISSIONS = 16384
"""Maximum number of open submissions of one server; the server holds back further requests."""
MAX_LENGTH = (1 << 31) - 1
"""Maximum of lengths and positions in tokens; it fits a signed 32-bit integer."""
MAX_NUMBER = (1 << 63) - 1
"""Maximum of submission numbers; it fits a signed 64-bit integer."""
MAX_STEP_TIMES = 64
"""Maximum number of pass sizes in one Heartbeat."""
MAX_TEXT_CHARS = 4096
"""Maximum length of a text in a message, such as a model name or a reason, in characters."""

Length = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Positive = Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0)]
"""A token id; each end also checks it against its vocabulary."""
Finite = Meta(le=sys.float_info.max)
"""Bound of a number that may be neither infinite nor NaN."""
Seconds = Annotated[float, Meta(ge=0), Finite]
Temperature = Annotated[float, Meta(ge=MIN_TEMPERATURE), Finite]
"""A temperature above 0. Sampling divides the logits by it in float32."""
Probability = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


class OverloadLevel(IntEnum):
    """The work that an overloaded sidecar skips, besides the work of the lower levels.

    `sidecar/overload.py` chooses the level. The sidecar never skips step drafts.
    """

    NONE = 0
    """Nothing: the sidecar is not overloaded."""
    SERVED = 1
    """Completions of requests that their target serves already."""
    HALF = 2
    """Half of the completions of each waiting request."""
    FIRST = 3
    """All completions of a waiting request but the first one."""
    SHORT = 4
    """The second half of first completions, for the servers that are late (`Overload`)."""
    DECLINE = 5
    """Requests far back in the queues of late servers: the sidecar declines their Submits."""


def max_to_sidecar_bytes(context_len: int) -> int:
    """Maximum size, in bytes, of a frame to a sidecar with this context length.

    A token takes at most five bytes. The constant covers the other fields of a `Submit`, the
    largest `Commits`, and the largest `States`.
    """
    return (128 << 10) + 6 * context_len


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a session. The server sends it again when the sidecar may have been replaced."""

    protocol: int
    vocab_size: Positive
    """Number of token ids of the target. The sidecar drafts only ids below it."""
    fingerprint: Text
    """Digest of the target's tokenizer (`link.fingerprint`)."""
    number: Number = 0
    """Sequence number. `Welcome` repeats it; the server ignores a Welcome with another number."""
    head: Text = ""
    """Digest of the head for which the server sends states (`heads.config.digest`); empty for none.
    """


class SeededSampling(msgspec.Struct, frozen=True):
    """Sampling seed and filters of a sampled request, used by both target and sidecar.

    Both take the Gumbel arg max with noise derived from `seed` and the token's position
    (`verify.sample`), so they choose the same token wherever their distributions nearly agree.

    With `probabilities` the target accepts step drafts by rejection sampling (`verify.rejection`).
    The server then sends 0 as the seed. The sidecar samples step drafts with its own random
    numbers and sends the `Candidates` of each token; its first completion is greedy.
    """

    seed: Annotated[int, Meta(ge=-MAX_NUMBER - 1, le=MAX_NUMBER)]
    temperature: Temperature
    top_k: Positive = 1 << 30
    """Number of most likely tokens that are sampled from; the default means all tokens."""
    top_p: Probability = 1.0
    """Cumulative probability of the most likely tokens that are sampled from; 1 means all."""
    min_p: Probability = 0.0
    """Minimum probability of a token, relative to the most likely token; 0 means no minimum."""
    probabilities: bool = False
    """Whether the target accepts step drafts by rejection sampling, and needs `Candidates`."""


class Candidates(msgspec.Struct, frozen=True):
    """The distribution that the sidecar sampled one draft token from."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_CANDIDATES)]
    """Distinct token ids, the draft token among them."""
    probs: list[Annotated[float, Meta(gt=0, le=1)]]
    """Probability of each candidate; the sum is 1 within `frame.MAX_ROUNDING`."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Asks for `completions` drafts that continue `token_ids`, and for step drafts after Commits.

    With 0 completions the sidecar only drafts steps.
    """

    submission: Number
    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    """Prompt followed by the output committed so far."""
    base_len: Length
    """Length of the committed output in `token_ids`, in tokens."""
    max_new_tokens: Length
    """Maximum useful length of a completion, in tokens."""
    completions: Length
    """Number of completions to draft."""
    temperature: Annotated[float, Meta(ge=0), Finite]
    """Temperature of the sampled completions; 0 makes them greedy, and the lowest other temperature
    is MIN_TEMPERATURE."""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] = []
    """A completion ends after any of these tokens."""
    ignore_eos: bool = False
    """Whether completions continue after the draft model's end-of-sequence tokens."""
    top_p: Probability = 1.0
    """Cumulative probability of the most likely tokens that completions are sampled from."""
    greedy_first: bool = True
    """Whether the first completion is greedy, or drawn with `seeded`. If False, all completions
    are sampled."""
    rank: tuple[int, int] = (0, 0)
    """Rank in the server's queue. The server serves requests of a smaller rank first, and requests
    of equal rank in the order of their Submits."""
    seeded: SeededSampling | None = None
    """Sampling seed and filters of the first completion and the step drafts; None makes them
    greedy."""
    scope: Number = 0
    """Number of the request's LoRA adapter and cache keys together, which the server assigns; 0
    without them. Requests with different numbers share no drafts and no KV."""


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    """The target has begun to serve the request: complete the drafts of waiting requests first."""

    submission: Number


class Commit(msgspec.Struct, frozen=True):
    """Output that the target committed for one request since the server's last report."""

    submission: Number
    base_len: Length
    """Length of the committed output before `token_ids`, in tokens."""
    token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_COMMIT_TOKENS)]
    """Committed tokens. The sidecar skips tokens that it already has. If `base_len`
    is beyond the output that it has, it answers with a `Gap`."""
    max_new_tokens: Annotated[int, Meta(ge=0, le=MAX_LOOKAHEAD)]
    """Number of tokens to draft ahead of the committed output."""


class Commits(msgspec.Struct, frozen=True, tag="commits"):
    """Output of several requests, to draft from before any other work."""

    requests: Annotated[list[Commit], Meta(max_length=MAX_COMMITS)]


class States(msgspec.Struct, frozen=True, tag="states"):
    """Hidden states that the target has computed along a request's text, for a head.

    They are projected to the width of the head. A sidecar with a draft model ignores them.
    """

    submission: Number
    start: Length
    """Position of the token that the first state belongs to. The text is the prompt, then the
    output."""
    data: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)]
    """bfloat16 [tokens, width] in the order of the bytes of this machine, row by row."""


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The request has finished or was aborted; the sidecar drops it."""

    submission: Number


class Rest(msgspec.Struct, frozen=True, tag="rest"):
    """Says whether the server wants no passes of the draft model at the moment.

    A sidecar on CPUs of its target rests while the target uses them. It reads messages meanwhile.
    """

    rests: bool


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for a `Heartbeat`, and shows that the server is alive; sent about once a second."""

    number: Number = 0
    """Sequence number, which the Heartbeat repeats as `answers`."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answers `Hello`: the sidecar accepts the server."""

    protocol: int
    model: Text
    """Display name of the draft model."""
    vocab_size: Length
    """Number of token ids of the draft model. The server sends only texts with ids below it."""
    context_len: Length
    """Context length of the draft model: maximum length of prompt and completion, in tokens."""
    session: Text = ""
    """Identifies the session of this server. If it changes, the sidecar has none of the earlier
    submissions."""
    number: int = 0
    """`number` of the Hello that this message answers."""
    max_text_tokens: Count = 1 << 31
    """Maximum number of `Submit.token_ids` that the sidecar keeps for one server, summed over its
    open submissions. The server holds back further requests."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Answers `Hello`: the sidecar does not accept the server."""

    reason: Text
    """Why, in words for the server's log: a protocol or model mismatch, or too many servers."""


class Drafted(msgspec.Struct, frozen=True, tag="drafted"):
    """New tokens of one completion."""

    submission: Number
    completion: Length
    """Number of the completion within the request. 0 is the greedy completion, or the one drawn
    with the request's own seed, if the request has one. Numbers from `config.MAX_COMPLETIONS` on
    are step drafts; each replaces the previous step draft."""
    base_len: Length
    """Length of the committed output that the completion continues, in tokens."""
    start: Length
    """Position of the first of `token_ids` within the completion."""
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_DRAFTED_TOKENS)]
    """New tokens."""
    finished: bool = False
    """Whether the completion is complete; for a step draft, complete until the next Commit. If no
    step draft continues after a Commit, the sidecar sends this with empty `token_ids`."""
    known_len: Length = 0
    """For step drafts, length of the committed output that the sidecar had when it sent this
    message. A step draft that `finished` may continue once the sidecar reads a later Commit."""
    candidates: Annotated[list[Candidates], Meta(max_length=MAX_DRAWN_TOKENS)] = []
    """Candidates of each of `token_ids`; empty unless `SeededSampling.probabilities` is set."""
    second_ids: Annotated[list[TokenId], Meta(max_length=MAX_DRAFTED_TOKENS)] = []
    """For step drafts of greedy requests, the second likeliest token in place of each of
    `token_ids`; may be empty."""


class Gap(msgspec.Struct, frozen=True, tag="gap"):
    """Answers a `Commit` that the sidecar cannot apply, because it lacks earlier output."""

    submission: Number
    known_len: Length | None
    """Length of the committed output that the sidecar has; the next Commit must start there. None
    if it does not have the submission; the server must then submit the request again."""


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """The sidecar has dropped this submission, and does not draft for it."""

    submission: Number
    reason: Text
    """Why, in words for the server's log."""
    retry: bool = False
    """Whether the server may submit the request again, once some of its submissions have ended and
    the sidecar has room."""
    retry_after_s: Seconds = 0.0
    """With `retry`, seconds for which the server waits before it submits the request again. Above
    0 the sidecar is overloaded. It never declines a Submit without completions for this reason."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Answers `Ping` with the load and the counters of the sidecar."""

    requests: Count
    """Requests with unfinished drafts, over all servers."""
    rows: Count
    """Completions that the latest pass advanced; 0 when the sidecar is idle."""
    drafted_tokens: Count
    """Tokens drafted since the sidecar started."""
    dropped_messages: Count
    """Messages dropped since the sidecar started, because a server's queue was full or the server
    had disconnected."""
    answers: Count = 0
    """`number` of the Ping that this message answers; the sidecar has read all earlier messages."""
    step_passes: Count = 0
    """Passes of the draft model that advanced step drafts, since the sidecar started."""
    step_tokens: Count = 0
    """Step draft tokens that the `step_passes` produced."""
    step_seconds: Seconds = 0.0
    """Total duration of the `step_passes`, in seconds."""
    step_times: Annotated[
        list[tuple[Annotated[float, Meta(ge=1), Finite], Seconds]], Meta(max_length=MAX_STEP_TIMES)
    ] = []
    """Recent mean duration of a step pass by its size: (completions advanced, seconds), smallest
    size first."""
    read_seconds: Seconds = 0.0
    """Recent mean duration of reading a prompt token, in seconds; 0 before it is known."""
    texts: Count = 0
    """Number of distinct prompts that the sidecar keeps, over all servers."""
    kv_rows: Count = 0
    """Number of open rows of the draft model's KV."""
    kv_tokens: Count = 0
    """Number of KV slots that the open rows hold."""
    backlog_s: Seconds = 0.0
    """Seconds that the sidecar needs, at its recent speed, for the step drafts and the first
    completions that are not finished, over all servers."""
    overload: Count = 0
    """The `OverloadLevel`: while it is above 0, the server asks for less, and prefers its other
    sidecars."""
    pass_seconds: Seconds = 0.0
    """Total duration of all passes of the draft model since the sidecar started, in seconds."""
    guessed_tokens: Count = 0
    """Guesses of the draft model's own head that passes verified since the sidecar started."""
    right_guesses: Count = 0
    """Right ones among the `guessed_tokens`, each of which gave a token."""


ToSidecar = Hello | Submit | Admit | Commits | States | Close | Rest | Ping
FromSidecar = Welcome | Refusal | Drafted | Gap | Declined | Heartbeat


def submissions_of(message: ToSidecar) -> list[int]:
    """The numbers of the submissions that a message is about."""
    if isinstance(message, Commits):
        return [commit.submission for commit in message.requests]
    return [] if isinstance(message, Hello | Rest | Ping) else [message.submission]
