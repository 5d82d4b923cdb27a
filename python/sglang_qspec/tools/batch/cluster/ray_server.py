"""A server on the cluster, as the batch sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from sglang_qspec.errors import BatchError, QSpecError, ServerLostError, first_line
from sglang_qspec.tools.batch.cluster import session
from sglang_qspec.tools.batch.cluster.actors import ServerActor, ServerSpec
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.server import Note, Reply
from sglang_qspec.tools.guesses.guess import Guess

logger = logging.getLogger(__name__)

MAX_CALLS = 10_000
"""Maximum number of calls of an actor at once; more than any server's depth."""
REMIND_S = 60.0
"""Time between two messages about a server that does not start, in seconds."""
CLOSE_S = 30.0
"""Time limit for the end of a server."""
STARTS = 3
"""Number of failed starts in a row after which the batch stops."""


class RayServer:
    """An actor that holds a server.

    Ray chooses the node, and waits until a node has the resources. `open` replaces an actor that
    died. Ray's own restarts are off: a call of an actor that waits for its restart would wait too,
    perhaps for a node that never comes, and its line with it.
    """

    def __init__(self, number: int, spec: ServerSpec) -> None:
        """`number` is that of the server, from 1."""
        self.name = f"server {number}"
        self._spec = spec
        self._depth = 0
        self._actor: Any = None
        self._is_open = False
        """Whether the actor has opened its server. Without a node it would not answer a call."""
        self._failed_starts = 0

    @property
    def depth(self) -> int:
        """Number of lines that the server should have at once."""
        return self._depth

    async def open(self) -> None:
        """Wait for the resources, and start the server, after a failed start on another node.

        Raises ServerLostError if the actor dies, and BatchError after three failed starts in a row.
        """
        self._is_open = False
        while True:
            try:
                self._depth = await self._start()
                break
            except RayError as error:
                self._forget_dead(error)
                raise ServerLostError(f"{self.name}: {first_line(error)}") from None
            except QSpecError as error:
                self._failed_starts += 1
                self._give_up_actor()
                if self._failed_starts == STARTS:
                    raise BatchError(f"{self.name}: {error}") from None
                logger.warning("%s: %s; it is started again", self.name, error)
        self._is_open = True
        self._failed_starts = 0

    async def _start(self) -> int:
        """Let the actor start its server; returns the depth. Raises QSpecError and RayError."""
        if self._actor is None:
            remote: Any = ray.remote(ServerActor).options(
                num_cpus=self._spec.cores,
                num_gpus=self._spec.gpus,
                max_restarts=0,
                max_concurrency=MAX_CALLS,
            )
            self._actor = remote.remote(self._spec)
        return await self._reminded(asyncio.ensure_future(_call(self._actor.open)))

    async def _reminded(self, opening: asyncio.Future[int]) -> int:
        """The result of `opening`; says now and then that it still takes time."""
        try:
            while not (await asyncio.wait((opening,), timeout=REMIND_S))[0]:
                logger.info(
                    "%s has not started yet; it needs %d CPUs and %d GPUs, and the cluster has %g "
                    "and %g free",
                    *(self.name, self._spec.cores, self._spec.gpus),
                    *(session.free("CPU"), session.free("GPU")),
                )
        except asyncio.CancelledError:
            opening.cancel()
            raise
        return opening.result()

    async def ask(self, line: Line, guesses: Sequence[Guess], _note: Note | None = None) -> Reply:
        """Send a line and wait for its reply, which is not streamed. Raises ServerLostError."""
        if self._actor is None:
            raise ServerLostError(f"{self.name} has died")
        try:
            reply: Reply = await _call(self._actor.ask, line, guesses)
        except RayError as error:
            self._forget_dead(error)
            raise ServerLostError(f"{self.name}: {first_line(error)}") from None
        except ServerLostError as error:
            raise ServerLostError(f"{self.name}: {error}") from None
        return reply

    async def close(self) -> None:
        """End the server and its actor."""
        if self._actor is not None and self._is_open:
            try:
                await asyncio.wait_for(_call(self._actor.close), CLOSE_S)
            except (QSpecError, RayError, TimeoutError) as error:
                logger.debug("%s did not end in time: %s", self.name, error)
        self._give_up_actor()

    def _forget_dead(self, error: RayError) -> None:
        """Forget an actor that has died, so that `open` makes a new one."""
        if isinstance(error, ActorDiedError):
            self._actor = None

    def _give_up_actor(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)


async def _call(method: Any, *arguments: Any) -> Any:
    """The result of an actor's method. Raises QSpecError as the method does, and RayError."""
    try:
        return await method.remote(*arguments)
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, QSpecError) else error from None
