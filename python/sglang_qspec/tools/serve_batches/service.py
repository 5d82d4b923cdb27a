"""What the service does with files and batches, for the routes and all the time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import IO, Any

from msgspec.structs import replace

from sglang_qspec.errors import BatchError, ClaimLostError, QSpecError
from sglang_qspec.tools.batch.bucket import Bucket
from sglang_qspec.tools.batch.http_server import HttpServer
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.line_guesses import LineGuesses
from sglang_qspec.tools.batch.partial import Partials
from sglang_qspec.tools.batch.runner import Runner
from sglang_qspec.tools.batch.server import Reply
from sglang_qspec.tools.serve_batches.feed import LINES_AHEAD, Feed
from sglang_qspec.tools.serve_batches.files import Files
from sglang_qspec.tools.serve_batches.forms import NewBatch
from sglang_qspec.tools.serve_batches.job import RETRY_S
from sglang_qspec.tools.serve_batches.lives import Lives, object_name
from sglang_qspec.tools.serve_batches.metrics import Metrics
from sglang_qspec.tools.serve_batches.objects import (
    ApiError,
    Batch,
    BatchStatus,
    FileObject,
    FilePurpose,
    new_id,
)
from sglang_qspec.tools.serve_batches.shared_server import SharedServer
from sglang_qspec.tools.serve_batches.state import State
from sglang_qspec.tools.serve_batches.store import LEASE_S, Claimed, Kind, Message, ids_of
from sglang_qspec.tools.serve_batches.tenants import Tenant, Tenants
from sglang_qspec.tools.serve_batches.webhooks import Webhooks

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two looks at deadlines, and at records that a disk has refused."""
BEAT_S = LEASE_S / 5
"""Seconds between two renewals of the lease of a gateway."""
EXPIRY_S = 60.0
"""Seconds between two looks at files that have expired."""
NOT_CONNECTED = "not connected yet"


class Service:
    """Owns the running batches and the connections to the servers."""

    def __init__(
        self,
        state: State,
        files: Files,
        servers: Callable[[], Sequence[HttpServer]],
        tenants: Tenants,
        *,
        strict_deadlines: bool = False,
        webhooks: Webhooks,
        expected: float = 0.0,
        bucket: Bucket | None = None,
    ) -> None:
        """`servers` makes the servers that answer lines, anew after each failure of all of them.

        `strict_deadlines` and `bucket` are those of `Lives`, and `expected` that of `Speed`.
        """
        self.feed = Feed(expected)
        self.metrics = Metrics(self.feed)
        self.servers_error: str | None = NOT_CONNECTED
        """Why no server answers; None while one does."""
        self._state, self._files, self._servers = state, files, servers
        self._tenants, self._webhooks = tenants, webhooks
        self._bucket = bucket
        given: Any = {"strict_deadlines": strict_deadlines, "bucket": bucket}
        self._lives = Lives(state, files, self.feed, tenants, self._tell, **given)
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: set[str] = set()
        """Ids of the batches and messages that a task of this gateway has."""
        self._texts: Partials | None = None
        """Texts of unfinished answers, while servers are asked."""
        self._left: list[Path] = []
        """Files of such texts that other gateways have left, and that were not read yet."""

    async def start(self) -> None:
        """Go on with all batches that no other gateway serves, and connect to the servers."""
        claimed = await self._state.beat()
        if self._files.is_alone and claimed.is_alone:
            batches = await self._state.running()
            kept = {file.id for _, file in await self._state.files()} | ids_of(batches)
            running = {batch.id for batch in batches}
            await asyncio.to_thread(self._files.sweep, kept, running, claimed.ended)
        self._take(claimed)
        for work in (self._ask_servers, self._tick, self._expire_files):
            self._spawn(work())
        if self._state.gateway is not None:
            self._files.share()
            self._spawn(self._beat())

    async def stop(self) -> None:
        """End all tasks; batches that are not done go on at another gateway, or the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(BatchError):
            await self._state.leave()
        self._state.close()

    # Other gateways

    async def _beat(self) -> None:
        """Renew the lease, and serve what this gateway has claimed, and nothing else."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                claimed = await self._state.beat()
                self._take(claimed)
                await self._show_progress(claimed)
            except BatchError as error:
                if time.monotonic() - last > LEASE_S and self.feed.jobs:
                    logger.error("all batches wait: %s", error)
                    for job in self.feed.jobs:
                        job.drop()
            else:
                last = time.monotonic()

    def _take(self, claimed: Claimed) -> None:
        """Serve what this gateway has claimed, and stop what another has or was asked to cancel."""
        self._left += [self._files.partial(id) for id in claimed.ended]
        self._read_left()
        for message in claimed.messages:
            self._deliver_soon(message)
        batches = {batch.id: batch for _, batch in claimed.batches}
        for job in self.feed.jobs:
            if job.id not in batches:
                job.drop()
            elif batches[job.id].status is BatchStatus.CANCELLING:
                job.stop(BatchStatus.CANCELLED)
        for tenant, batch in claimed.batches:
            self._serve_soon(tenant, batch)

    def _read_left(self) -> None:
        """Use the texts that other gateways have left as guesses."""
        if self._texts is not None:
            for path in self._left:
                self._texts.adopt(path)
            self._left.clear()

    async def _show_progress(self, claimed: Claimed) -> None:
        """Let other gateways show the progress of the batches. Raises BatchError."""
        for tenant, batch in claimed.batches:
            now = self._now(batch)
            if now == batch:
                continue

            def change(batch: Batch, now: Batch = now) -> Batch:
                if batch.status is not now.status:
                    return batch
                return replace(batch, request_counts=now.request_counts, qspec=now.qspec)

            with contextlib.suppress(ClaimLostError):
                await self._state.change(tenant, batch.id, change)

    def _serve_soon(self, tenant: str, batch: Batch) -> None:
        """Begin to serve a batch, unless that has begun."""
        self._begin(batch.id, self._lives.serve(tenant, batch))

    def _deliver_soon(self, message: Message) -> None:
        """Begin to send a message, unless that has begun."""
        self._begin(message.id, self._deliver(message))

    def _begin(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        if id in self._serving:
            work.close()
            return
        self._serving.add(id)
        self._spawn(work).add_done_callback(lambda _: self._serving.discard(id))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the service failed", exc_info=error)

    async def _tell(self, batch: Batch) -> None:
        """Count a batch that has ended, and begin to send the message about it."""
        self.metrics.end(batch)
        for message in await self._state.messages(batch.id):
            self._deliver_soon(message)

    async def _deliver(self, message: Message) -> None:
        """Send a message to the webhook of its tenant, if it has one.

        The message stays in the database until it is taken or given up.
        """
        webhook = self._tenants.named(message.tenant).webhook
        if webhook is not None:
            await self._webhooks.send(webhook, message, self._state.note_attempt)
        await self._state.forget(message.id)

    # Files

    async def create_file(
        self, tenant: Tenant, content: IO[bytes], size: int, filename: str, seconds: int | None
    ) -> FileObject:
        """Keep an uploaded file of `size` bytes, for ever or some seconds. Raises ApiError."""
        held = await self._state.totals(FileObject, tenant.name)
        if size > tenant.file_bytes:
            raise ApiError(
                413,
                f"the file has {size} bytes, but at most {tenant.file_bytes} are allowed",
                param="file",
                code="file_too_large",
            )
        if held.number >= tenant.files:
            raise ApiError(
                429,
                f"there are {held.number} files, and at most {tenant.files} are "
                "allowed; delete some",
                code="too_many_files",
            )
        if held.bytes + size > tenant.bytes:
            raise ApiError(
                429,
                f"all files have {held.bytes} bytes, and at most {tenant.bytes} "
                "are allowed; delete some",
                code="too_many_bytes",
            )
        now = int(time.time())
        file = FileObject(
            id=new_id("file-"),
            bytes=size,
            created_at=now,
            filename=filename,
            purpose=FilePurpose.INPUT,
            expires_at=None if seconds is None else now + seconds,
        )
        try:
            await asyncio.to_thread(self._files.write, file.id, content)
        except OSError as error:
            message = f"the file cannot be kept: {error.strerror}"
            raise ApiError(507, message, code="insufficient_storage") from None
        await self._state.add(tenant.name, file)
        return file

    async def get(self, kind: type[Kind], tenant: Tenant, id: str) -> Kind:
        """A file or batch as it is now. Raises ApiError if the tenant has none with this id."""
        found = await self._state.get(kind, id, tenant.name)
        if found is None:
            name = "Batch" if kind is Batch else "File"
            raise ApiError(404, f"no such {name} object: {id}", param="id", code="not_found")
        return self._now(found)

    async def page(self, kind: type[Kind], tenant: Tenant, **asked: Any) -> tuple[list[Kind], bool]:
        """Files or batches as they are now, as `Store.page`."""
        found, more = await self._state.page(kind, tenant.name, **asked)
        return [self._now(each) for each in found], more

    async def delete_file(self, tenant: Tenant, id: str) -> None:
        """Delete a file. Raises ApiError if a batch still reads it."""
        file = await self.get(FileObject, tenant, id)
        running = await self._state.running()
        if file.id in ids_of(running):
            raise ApiError(409, f"a batch still reads {id}; cancel it first", code="file_in_use")
        await self._remove_file(tenant.name, file)

    async def _remove_file(self, tenant: str, file: FileObject) -> None:
        """Remove a file and its copy. Raises BatchError."""
        if self._bucket is not None and file.purpose is FilePurpose.OUTPUT:
            await asyncio.to_thread(self._bucket.remove, object_name(tenant, file))
        await self._state.remove(file.id)
        await asyncio.to_thread(self._files.remove, file.id)

    async def content(self, tenant: Tenant, id: str) -> Path:
        """The path of a file's content. Raises ApiError."""
        return self._files.path((await self.get(FileObject, tenant, id)).id)

    # Batches

    async def create_batch(self, tenant: Tenant, asked: NewBatch) -> Batch:
        """Begin a batch. Raises ApiError."""
        file = await self._state.get(FileObject, asked.input_file_id, tenant.name)
        if file is None or file.purpose is not FilePurpose.INPUT:
            message = f"input_file_id is {asked.input_file_id!r}, but no file of purpose 'batch'"
            raise ApiError(400, message, param="input_file_id", code="invalid_value")
        held = await self._state.totals(Batch, tenant.name)
        if held.number >= tenant.batches:
            raise ApiError(
                429,
                f"{held.number} batches are not done, and at most {tenant.batches} are allowed",
                code="too_many_batches",
            )
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + asked.seconds,
            metadata=asked.metadata,
            output_expires_after=asked.output_expires_after,
        )
        await self._state.add(tenant.name, batch)
        self._serve_soon(tenant.name, batch)
        return batch

    async def cancel(self, tenant: Tenant, id: str) -> Batch:
        """Cancel a batch; its answers so far are kept. Raises ApiError."""
        await self.get(Batch, tenant, id)

        def change(batch: Batch) -> Batch:
            if batch.status.is_final or batch.status is BatchStatus.FINALIZING:
                message = f"the batch is {batch.status.value} and cannot be cancelled"
                raise ApiError(409, message, code="batch_not_running")
            if batch.status is BatchStatus.CANCELLING:
                return batch
            return replace(batch, status=BatchStatus.CANCELLING, cancelling_at=int(time.time()))

        batch = await self._state.change(tenant.name, id, change, anyone=True)
        job = self.feed.job(id)
        if job is not None:
            job.stop(BatchStatus.CANCELLED)
        return batch

    def _now(self, found: Kind) -> Kind:
        """An object with what the database does not have: the progress of a running batch."""
        job = self.feed.job(found.id)
        if job is None or not isinstance(found, Batch):
            return found
        figures = replace(
            job.figures(),
            planned_seconds=found.qspec.planned_seconds,
            estimated_seconds=self.feed.seconds(
                job.left * job.lengths.mean(self.feed.usual_tokens),
                *(found.expires_at, job.id, job.speed.rate),
            ),
            waits_for=job.waits_for or self.servers_error,
        )
        return replace(found, request_counts=job.counts, qspec=figures)

    # What goes on all the time

    def connect(self, error: str | None) -> None:
        """Note why no server answers, or that one does; log it once."""
        if error != self.servers_error:
            if error is None:
                logger.info("a server answers")
            else:
                logger.error("%s", error)
        self.servers_error = error
        self.metrics.connected = error is None

    async def _ask_servers(self) -> None:
        """Let the servers answer the lines of all batches, again after each failure of all."""
        while True:
            servers = [SharedServer(server, self.feed) for server in self._servers()]
            path = self._files.partial(self._state.gateway)
            with Partials.open(path, resume=True) as self._texts:
                self._read_left()
                guesses = LineGuesses(self._texts, None)
                runner = Runner(servers, _Sink(self), guesses, lines_ahead=LINES_AHEAD)
                rooms = [asyncio.create_task(each.make_room(runner.limit)) for each in servers]
                try:
                    await runner.run(self.feed.lines())
                except QSpecError as error:
                    self.connect(str(error))
                finally:
                    self._texts = None
                    for room in rooms:
                        room.cancel()
            self.feed.take_back()
            await asyncio.sleep(RETRY_S)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.feed.tick()

    async def _expire_files(self) -> None:
        """Delete files at the end of their lives, if no batch reads them."""
        while True:
            with contextlib.suppress(BatchError, OSError):  # it is tried again
                files = await self._state.files()
                running = await self._state.running()
                kept = ids_of(running)
                for tenant, file in files:
                    late = file.expires_at is not None and file.expires_at <= time.time()
                    if late and file.id not in kept:
                        await self._remove_file(tenant, file)
            await asyncio.sleep(EXPIRY_S)


class _Sink:
    """Passes replies on to the feed, and notes that servers answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def begin(self) -> None:
        self._service.connect(None)
        self._service.feed.begin()

    def settle(self, line: Line, reply: Reply) -> None:
        if self._service.feed.settle(line, reply):
            self._service.metrics.settle(reply)
