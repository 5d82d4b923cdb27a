"""What a batch needs of a server, and the reply of a server to one line.

`http_server`, `own_server` and `cluster.ray_server` implement the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.guesses.guess import Guess

Note = Callable[[Guess], object]
"""Takes the text of an answer that is not complete: now and then, and when it is cut."""


class ReplyKind(Enum):
    """What a reply means for its line."""

    ANSWERED = auto()
    REFUSED = auto()
    """The line itself is wrong; another attempt would get the same reply."""
    BUSY = auto()
    """The server takes no request now."""
    FAILED = auto()
    YIELDED = auto()
    """The line made room for the requests of others. It is asked again, as if it had not been."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a server to one line."""

    kind: ReplyKind
    status: int | None = None
    """HTTP status; None without a response."""
    body: bytes = b"null"
    """JSON of the response."""
    reason: str = ""
    """Why there is no answer."""
    code: str = "failed"
    """Why there is no answer, in a word."""
    request_id: str = ""
    tokens: int = 0
    """Number of output tokens."""
    passes: int = 0
    """Number of target passes after prefill; 0 if the server does not say."""
    accepted: int = 0
    """Number of output tokens that were drafted, each of which saved a pass."""


class LineServer(Protocol):
    """A server that answers lines."""

    @property
    def name(self) -> str:
        """Unique name for messages, and for the choice of the server of a line."""

    @property
    def depth(self) -> int:
        """Number of lines that the server should have at once. `open` finds it."""

    async def open(self) -> None:
        """Make the server ready to be asked, also after it was lost.

        Raises ServerLostError if it may answer later, and another QSpecError if it never will.
        """

    async def ask(self, line: Line, guesses: Sequence[Guess], note: Note | None, /) -> Reply:
        """Send a line with guesses of its answer, and wait for its reply.

        The most likely guess is the first; a server may leave out guesses. Raises ServerLostError.
        """

    async def close(self) -> None:
        """Free what `open` took. The server answers no line from now on."""
