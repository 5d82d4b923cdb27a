"""Every message on the wire between a server and its sidecar.

    server  ->  sidecar     Hello, Submit, Admit, Commits, Close, Ping
    sidecar ->  server      Welcome, Refusal, Drafted, Gap, Declined, Heartbeat

Messages are tagged msgspec structs in msgpack, one to a ZMQ frame. Fields are only ever appended,
with a default. Token ids are the target's; lengths are in tokens.

Requests are named by `submission`, a number that the server mints for each Submit and never uses
twice. A client's request id never travels: it has any length and any characters, and a client may
use it again. A draft for a closed submission therefore cannot reach a later request.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 2
"""Version of this schema. The handshake refuses any other."""

MAX_FROM_SIDECAR_BYTES = 64 << 10
"""Maximum size of a frame to a server, in bytes. The scheduler's thread decodes these frames."""
MAX_DRAFTED_TOKENS = 512
"""Maximum number of tokens in one `Drafted`; a longer draft travels in several messages."""
MAX_DRAWN_TOKENS = 32
"""Maximum number of tokens in one `Drafted` that comes with `candidates`."""
MAX_CANDIDATES = 64
"""Maximum number of candidates sent with each token of a step draft."""
MAX_COMMITS = 256
"""Maximum number of requests in one `Commits`."""
MAX_COMMIT_TOKENS = 4096
"""Maximum number of tokens in one `Commit`; the rest follows in the next report."""
MAX_LOOKAHEAD = 64
"""Maximum number of tokens that a step draft runs ahead of the committed output."""
MIN_TEMPERATURE = 1e-6
"""Lowest temperature that is not 0. SGLang takes a lower one for greedy decoding."""
MAX_STOP_TOKENS = 1024
"""Maximum number of stop tokens in one `Submit`; a server leaves out the others."""
MAX_SUBMISSIONS = 16384
"""Maximum number of open submissions of one server; the server holds the others back."""


def max_to_sidecar_bytes(context_len: int) -> int:
    """Maximum size of a frame to a sidecar with this context length, in bytes.

    A token takes at most five bytes; the constant part holds the other fields of a `Submit`, and
    the largest `Commits`.
    """
    return (128 << 10) + 6 * context_len


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens the link. Sent again whenever the sidecar may have been replaced."""

    protocol: int
    vocab_size: int
    fingerprint: str
    """Digest of the target's tokenizer (`link.fingerprint`)."""
    number: int = 0
    """Grows with every Hello; the answer repeats it, and any other answer is ignored."""


class SeededSampling(msgspec.Struct, frozen=True):
    """Sampling seed and filters of a sampled request; its drafts are drawn with them, too.

    Target and sidecar take the Gumbel maximum with the noise that `seed` and a token's position
    give (`verify.sample`), so that they agree wherever their distributions nearly do.

    With `probabilities` the target accepts step drafts by rejection sampling (`verify.rejection`).
    The sidecar then ignores `seed`, which the server does not tell: it draws step drafts alone,
    with random numbers of its own, and sends the `Candidates` of each of their tokens.
    """

    seed: int
    temperature: float
    top_k: int = 1 << 30
    """Likeliest tokens that are drawn from; the default stands for all."""
    top_p: float = 1.0
    min_p: float = 0.0
    probabilities: bool = False


class Candidates(msgspec.Struct, frozen=True):
    """All tokens that a drafted one might have been, and how likely each of them was."""

    token_ids: list[int]
    """Different ones, `MAX_CANDIDATES` at most."""
    probs: list[float]
    """Probability of each candidate, over 0; the sum is 1 within `frame.MAX_ROUNDING`."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Draft `completions` continuations of `token_ids`; with none, only follow its `Commits`."""

    submission: int
    token_ids: list[int]
    """Prompt followed by the output committed so far; at least one token."""
    base_len: int
    """How many of `token_ids` are committed output."""
    max_new_tokens: int
    """Longest useful completion."""
    completions: int
    temperature: float
    """Of the completions that are sampled."""
    stop_token_ids: list[int] = []
    """A completion ends after any of these."""
    ignore_eos: bool = False
    """The draft model's end-of-sequence tokens do not end a completion."""
    top_p: float = 1.0
    """Sampled completions keep to the likeliest tokens that have this much probability together."""
    greedy_first: bool = True
    """The first completion is greedy, or drawn with `seeded`; otherwise all are sampled."""
    rank: tuple[int, int] = (0, 0)
    """Requests of a smaller rank are served sooner, whenever they came; those of one rank in the
    order of their Submits."""
    seeded: SeededSampling | None = None
    """Of its first completion and its step drafts; without, they are greedy."""


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    """The request waits no longer: those that do come first."""

    submission: int


class Commit(msgspec.Struct, frozen=True):
    """Output that the target has committed for one request since the server's last report."""

    submission: int
    base_len: int
    """Committed output length before `token_ids`."""
    token_ids: list[int]
    """At least one token. Tokens that the sidecar knows already are skipped; where tokens between
    those and these are missing, it answers with a `Gap`."""
    max_new_tokens: int
    """How far to draft ahead of it, in tokens; at most MAX_LEAD."""


class Commits(msgspec.Struct, frozen=True, tag="commits"):
    """What these requests have committed in a pass: draft on from there, before all else."""

    requests: list[Commit]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The request finished or aborted: stop working on it."""

    submission: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for a `Heartbeat`; sent about once a second, so that the sidecar knows who is alive."""

    number: int = 0
    """Grows with every Ping."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answers `Hello`: drafts may be asked for."""

    protocol: int
    model: str
    """Display name of the draft model."""
    vocab_size: int
    context_len: int
    """Longest prompt plus completion that the draft model takes."""
    session: str = ""
    """Names this stay of the server at this sidecar; a new one means that earlier work is gone."""
    number: int = 0
    """The `number` of the Hello that this answers."""
    max_text_tokens: int = 1 << 31
    """Maximum number of `Submit.token_ids` that the sidecar keeps for one server, over all open
    submissions; the server holds the others back."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Answers `Hello`: this pair of models must not work together."""

    reason: str


class Drafted(msgspec.Struct, frozen=True, tag="drafted"):
    """More tokens of one completion, streamed as they come."""

    submission: int
    completion: int
    """Which of the request's completions; 0 is the likely one, if any is. Numbers from
    `config.MAX_COMPLETIONS` on are step drafts, each of which takes the place of the last; what
    follows `Commits`."""
    base_len: int
    """Committed output length that the completion continues from."""
    start: int
    """Position of the first of `token_ids` within the completion."""
    token_ids: list[int]
    """At most MAX_DRAFTED_TOKENS."""
    finished: bool = False
    """No more tokens of this completion will come; of a step draft, none until the next commit. Of
    steps this is said after each commit on which no draft goes on, with `token_ids` empty."""
    known_len: int = 0
    """Of a step draft: the committed output length that the sidecar knew of when it sent this. What
    is `finished` before the sidecar has read a commit goes on once it has."""
    candidates: list[Candidates] = []
    """Candidates of each of `token_ids`; empty unless `SeededSampling.probabilities` is set."""


class Gap(msgspec.Struct, frozen=True, tag="gap"):
    """Answers a `Commit` that the sidecar cannot apply: it asks for what it lacks."""

    submission: int
    known_len: int | None
    """Committed output length that the sidecar knows: the next Commit must start there. None if it
    does not know the submission: the server must submit the request anew."""


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """The sidecar keeps nothing of this submission: the server must not ask again at once."""

    submission: int
    reason: str
    retry: bool = False
    """The sidecar is full: the server may ask again when some of its submissions have ended."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The sidecar is alive, and how busy it is."""

    requests: int
    """Requests with unfinished completions, over all servers."""
    rows: int
    """Completions being drafted right now."""
    drafted_tokens: int
    """Tokens drafted since the sidecar started."""
    dropped_messages: int
    """Messages that a slow server's full queue has cost since the sidecar started."""
    answers: int = 0
    """The `number` of the Ping that this answers: all that was sent before it has been read."""
    step_passes: int = 0
    """Passes of the draft model that advanced step drafts, since the sidecar started."""
    step_tokens: int = 0
    """Step draft tokens that they gave."""
    step_seconds: float = 0.0
    """Seconds that they took together."""
    step_times: list[tuple[float, float]] = []
    """What such a pass takes lately: (completions advanced, seconds), from small to large."""
    texts: int = 0
    """Different texts that the sidecar keeps, over all servers."""
    kv_rows: int = 0
    """Rows of the draft model's KV that are open."""
    kv_tokens: int = 0
    """Tokens of KV that these rows hold."""


ToSidecar = Hello | Submit | Admit | Commits | Close | Ping
FromSidecar = Welcome | Refusal | Drafted | Gap | Declined | Heartbeat
