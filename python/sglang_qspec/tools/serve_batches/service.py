"""What the service does with files and batches, and the life of each batch.

A batch goes from state to state in one task. Each state is in the database before the next step
begins, and each step may be done twice, so a killed service goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from msgspec.structs import replace

from sglang_qspec.errors import BatchError, QSpecError
from sglang_qspec.policy import deadlines
from sglang_qspec.policy.deadlines import Due
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.lines import Lines
from sglang_qspec.tools.batch.results import Results
from sglang_qspec.tools.batch.runner import Runner
from sglang_qspec.tools.batch.server import LineServer, Reply
from sglang_qspec.tools.batch.source import FileSource
from sglang_qspec.tools.serve_batches import usage
from sglang_qspec.tools.serve_batches.feed import LINES_AHEAD, Feed, Stoppable
from sglang_qspec.tools.serve_batches.files import Files
from sglang_qspec.tools.serve_batches.forms import NewBatch
from sglang_qspec.tools.serve_batches.job import RETRY_S, Job
from sglang_qspec.tools.serve_batches.objects import (
    ApiError,
    Batch,
    Errors,
    Figures,
    FileObject,
    LineError,
    Purpose,
    Status,
    new_id,
)
from sglang_qspec.tools.serve_batches.store import Kind, Store, ids_of
from sglang_qspec.tools.serve_batches.tenants import Tenant, Tenants

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two looks at deadlines, and at records that a disk has refused."""
EXPIRY_S = 60.0
"""Seconds between two looks at files that have expired."""
NAMES = ("{}_output.jsonl", "{}_error.jsonl")
"""Names of a batch's files of answers and of failures."""

Result = TypeVar("Result")


class Service:
    """Owns the running batches, the connections to the servers, and the changes of all state."""

    def __init__(
        self,
        store: Store,
        files: Files,
        servers: Callable[[], Sequence[LineServer]],
        tenants: Tenants,
        *,
        strict_deadlines: bool = False,
        done: Callable[[str, Batch], None] = lambda _tenant, _batch: None,
    ) -> None:
        """`servers` makes the servers that answer lines, anew after each failure of all of them.

        With `strict_deadlines` a batch fails that cannot be done in time. `done` is called with
        tenant and batch when a batch has reached its final state.
        """
        self.feed = Feed()
        self._store, self._files, self._servers = store, files, servers
        self._tenants = tenants
        self._strict = strict_deadlines
        self._done = done
        self._thread = ThreadPoolExecutor(1, "database")
        self._tasks: set[asyncio.Task[None]] = set()
        self.servers_error: str | None = "not connected yet"
        """Why no server answers; None while one does."""

    async def start(self) -> None:
        """Go on with all batches that are not done, and connect to the servers."""
        running = await self._in_thread(self._store.running)
        kept = {file.id for _, file in await self._in_thread(self._store.files)}
        batches = [batch for _, batch in running]
        await asyncio.to_thread(
            self._files.sweep, kept | ids_of(batches), {batch.id for batch in batches}
        )
        for tenant, batch in running:
            self._spawn(self._serve(tenant, batch))
        self._spawn(self._ask_servers())
        self._spawn(self._tick())
        self._spawn(self._expire_files())

    async def stop(self) -> None:
        """End all tasks; batches that are not done go on at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, call: Callable[..., Result], *given: Any, **named: Any) -> Result:
        """The result of a call in the only thread that uses the database."""
        work = lambda: call(*given, **named)  # noqa: E731
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # Files

    async def create_file(
        self, tenant: Tenant, content: IO[bytes], size: int, filename: str, seconds: int | None
    ) -> FileObject:
        """Keep an uploaded file of `size` bytes, for ever or some seconds. Raises ApiError."""
        held = await self._in_thread(self._store.totals, FileObject, tenant.name)
        if size > tenant.file_bytes:
            raise ApiError(
                413,
                f"the file has {size} bytes, but at most {tenant.file_bytes} are allowed",
                param="file",
                code="file_too_large",
            )
        if held.count >= tenant.files:
            raise ApiError(
                429,
                f"there are {held.count} files, and at most {tenant.files} are "
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
            purpose=Purpose.INPUT,
            expires_at=None if seconds is None else now + seconds,
        )
        try:
            await asyncio.to_thread(self._files.write, file.id, content)
        except OSError as error:
            message = f"the file cannot be kept: {error.strerror}"
            raise ApiError(507, message, code="insufficient_storage") from None
        await self._in_thread(self._store.add, tenant.name, file)
        return file

    async def get(self, kind: type[Kind], tenant: Tenant, id: str) -> Kind:
        """A file or batch as it is now. Raises ApiError if the tenant has none with this id."""
        found = await self._in_thread(self._store.get, kind, id, tenant.name)
        if found is None:
            name = "Batch" if kind is Batch else "File"
            raise ApiError(404, f"no such {name} object: {id}", param="id", code="not_found")
        return self._now(found)

    async def page(self, kind: type[Kind], tenant: Tenant, **asked: Any) -> tuple[list[Kind], bool]:
        """Files or batches as they are now, as `Store.page`."""
        found, more = await self._in_thread(self._store.page, kind, tenant.name, **asked)
        return [self._now(each) for each in found], more

    async def delete_file(self, tenant: Tenant, id: str) -> None:
        """Delete a file. Raises ApiError if a batch still reads it."""
        file = await self.get(FileObject, tenant, id)
        running = await self._in_thread(self._store.running)
        if file.id in ids_of([batch for _, batch in running]):
            raise ApiError(409, f"a batch still reads {id}; cancel it first", code="file_in_use")
        await self._remove_file(id)

    async def _remove_file(self, id: str) -> None:
        await self._in_thread(self._store.remove, id)
        await asyncio.to_thread(self._files.remove, id)

    async def content(self, tenant: Tenant, id: str) -> Path:
        """The path of a file's content. Raises ApiError."""
        return self._files.path((await self.get(FileObject, tenant, id)).id)

    # Batches

    async def create_batch(self, tenant: Tenant, asked: NewBatch) -> Batch:
        """Begin a batch. Raises ApiError."""
        file = await self._in_thread(self._store.get, FileObject, asked.input_file_id, tenant.name)
        if file is None or file.purpose is not Purpose.INPUT:
            message = f"input_file_id is {asked.input_file_id!r}, but no file of purpose 'batch'"
            raise ApiError(400, message, param="input_file_id", code="invalid_value")
        held = await self._in_thread(self._store.totals, Batch, tenant.name)
        if held.count >= tenant.batches:
            raise ApiError(
                429,
                f"{held.count} batches are not done, and at most {tenant.batches} are allowed",
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
        await self._in_thread(self._store.add, tenant.name, batch)
        self._spawn(self._serve(tenant.name, batch))
        return batch

    async def cancel(self, tenant: Tenant, id: str) -> Batch:
        """Cancel a batch; its answers so far are kept. Raises ApiError."""
        await self.get(Batch, tenant, id)

        def change(batch: Batch) -> Batch:
            if batch.status.is_final or batch.status is Status.FINALIZING:
                message = f"the batch is {batch.status.value} and cannot be cancelled"
                raise ApiError(409, message, code="batch_not_running")
            if batch.status is Status.CANCELLING:
                return batch
            return replace(batch, status=Status.CANCELLING, cancelling_at=int(time.time()))

        batch = await self._change(tenant.name, id, change)
        job = self.feed.job(id)
        if job is not None:
            job.stop(Status.CANCELLED)
        return batch

    def _now(self, found: Kind) -> Kind:
        """An object with what the database does not have: the progress of a running batch."""
        job = self.feed.job(found.id)
        if job is None or not isinstance(found, Batch):
            return found
        return replace(found, request_counts=job.counts, qspec=self._figures(found, job))

    def _figures(self, batch: Batch, job: Job) -> Figures:
        return Figures(
            estimated_seconds=self._estimate(batch, job),
            waits_for=job.waits_for or self.servers_error,
            passes=job.passes,
            passes_saved=job.passes_saved,
        )

    def _estimate(self, batch: Batch, job: Job) -> float | None:
        """Seconds from now until the last answer of a batch, if batches are served by deadlines."""
        rate = self.feed.speed.rate
        if not rate:
            return None
        before = (due.tokens for due in self.feed.due(job.id) if due.deadline <= batch.expires_at)
        own = job.left * job.lengths.mean(self.feed.usual_tokens)
        return round((sum(before) + own) / rate, 1)

    async def _change(
        self, tenant: str, id: str, change: Callable[[Batch], Batch], *added: FileObject
    ) -> Batch:
        """Replace a batch by what `change` returns for it, and add files, all or nothing.

        Nothing else changes the batch meanwhile.
        """

        def work() -> Batch:
            before = self._store.get(Batch, id, tenant)
            assert before is not None  # batches are never removed
            after = change(before)
            if after is not before or added:
                self._store.put(tenant, after, *added)
            return after

        return await self._in_thread(work)

    # The life of a batch

    async def _serve(self, tenant: str, batch: Batch) -> None:
        """Take a batch from its present state to a final one, whatever the disk does meanwhile."""
        while True:
            try:
                batch = await self._live(tenant, batch.id)
            except (BatchError, OSError) as error:
                logger.error("%s waits: %s", batch.id, error)
                await asyncio.sleep(RETRY_S)
            else:
                break
        logger.info("%s is %s", batch.id, batch.status.value)
        self._done(tenant, batch)

    async def _live(self, tenant: str, id: str) -> Batch:
        """Serve a batch from the state that the database has; returns it in its final state.

        Raises BatchError and OSError if the disk does not take the records.
        """
        batch = await self._change(tenant, id, lambda batch: batch)
        if batch.status is Status.VALIDATING:
            batch = await self._validate(tenant, batch)
        if batch.finalizing_at is None and not batch.status.is_final:
            batch = await self._answer(tenant, batch)
        if not batch.status.is_final:
            batch = await self._finish(tenant, batch)
        return batch

    async def _validate(self, tenant: str, batch: Batch) -> Batch:
        """Read the input once: the batch is in progress then, has failed, or was cancelled."""
        lines = Lines(FileSource(str(self._files.path(batch.input_file_id))))
        lines.endpoint = batch.endpoint
        try:
            await asyncio.to_thread(lines.scan)
        except BatchError as error:
            errors = [LineError(code="file_unreadable", message=str(error))]
        else:
            errors = self._errors(tenant, batch, lines)
        now = int(time.time())

        def change(batch: Batch) -> Batch:
            if batch.status is not Status.VALIDATING:
                return batch
            if errors:
                found = Errors(data=errors)
                return replace(batch, status=Status.FAILED, failed_at=now, errors=found)
            return replace(batch, status=Status.IN_PROGRESS, in_progress_at=now)

        return await self._change(tenant, batch.id, change)

    def _errors(self, tenant: str, batch: Batch, lines: Lines) -> list[LineError]:
        """Why the lines cannot be served."""
        found = [
            LineError(code="invalid_line", message=message, line=number)
            for number, message in lines.bad
        ]
        total, most = lines.total or 0, self._tenants.named(tenant).lines
        if not total and not found:
            found.append(LineError(code="empty_file", message="the file has no line"))
        if total > most:
            message = f"the file has {total} lines, but at most {most} are allowed"
            found.append(LineError(code="too_many_lines", message=message))
        work = Due(tenant, batch.expires_at, total * self.feed.usual_tokens)
        due = sorted([*self.feed.due(), work], key=lambda each: each.deadline)
        load = deadlines.load(due, self.feed.speed.rate, time.time())
        if self._strict and load > 1.0:
            message = (
                f"completion_window is {batch.completion_window}, but the batches that are due "
                f"until then need {load:.2f} times the time that is left"
            )
            found.append(LineError(code="deadline_unreachable", message=message))
        return found

    async def _answer(self, tenant: str, batch: Batch) -> Batch:
        """Answer the lines, until all have a record or the batch is stopped."""
        with contextlib.ExitStack() as stack:
            paths = self._files.records(batch.id)
            results = await asyncio.to_thread(lambda: Results.open(*paths, resume=True))
            lines = Lines(FileSource(str(self._files.path(batch.input_file_id))))
            lines.answered, lines.endpoint = results.answered, batch.endpoint
            job = Job(batch.id, tenant, batch.expires_at, lines, results)
            stack.callback(job.close)
            await asyncio.to_thread(lines.scan)
            if batch.expires_at <= time.time():
                job.stop(Status.EXPIRED)
            self.feed.add(job)
            stack.callback(self.feed.remove, job)
            batch = await self._change(tenant, batch.id, lambda batch: batch)
            if batch.status is Status.CANCELLING:  # before the feed had the job
                job.stop(Status.CANCELLED)
            await job.over.wait()
            if job.stopped_as is Status.EXPIRED:
                reason = "the request could not be answered before the completion window expired"
                await job.leave_out("batch_expired", reason)
        now = int(time.time())
        counts, figures = job.counts, self._figures(batch, job)

        def change(batch: Batch) -> Batch:
            if job.stopped_as is Status.EXPIRED:
                batch = replace(batch, expired_at=now)
            if job.stopped_as is Status.FAILED:
                error = LineError(code="file_unreadable", message=job.waits_for or "")
                batch = replace(batch, failed_at=now, errors=Errors(data=[error]))
            cancelled = batch.status is Status.CANCELLING
            return replace(
                batch,
                status=batch.status if cancelled else Status.FINALIZING,
                finalizing_at=now,
                request_counts=counts,
                output_file_id=new_id("file-") if counts.completed else None,
                error_file_id=new_id("file-") if counts.failed else None,
                qspec=replace(figures, estimated_seconds=None, waits_for=None),
            )

        return await self._change(tenant, batch.id, change)

    async def _finish(self, tenant: str, batch: Batch) -> Batch:
        """Make the records files of the tenant, and the state final."""
        now = int(time.time())
        records = self._files.records(batch.id)
        added = []
        ids = (batch.output_file_id, batch.error_file_id)
        for path, id, name in zip(records, ids, NAMES, strict=True):
            if id is None:
                path.unlink(missing_ok=True)
                continue
            life = batch.output_expires_after
            added.append(
                FileObject(
                    id=id,
                    bytes=await asyncio.to_thread(self._files.keep, path, id),
                    created_at=now,
                    filename=name.format(batch.id),
                    purpose=Purpose.OUTPUT,
                    expires_at=None if life is None else now + life,
                )
            )
        if batch.output_file_id is not None:
            path = self._files.path(batch.output_file_id)
            batch = replace(batch, usage=await asyncio.to_thread(usage.of, path))
        return await self._change(tenant, batch.id, lambda _: _final(batch, now), *added)

    # What goes on all the time

    async def _ask_servers(self) -> None:
        """Let the servers answer the lines of all batches, again after each failure of all."""
        while True:
            self.servers_error = "not connected yet"
            servers = [Stoppable(server, self.feed) for server in self._servers()]
            runner = Runner(servers, _Sink(self), lines_ahead=LINES_AHEAD)
            try:
                await runner.run(self.feed.lines())
            except QSpecError as error:
                logger.error("no server answers: %s", error)
                self.servers_error = str(error)
            self.feed.take_back()
            await asyncio.sleep(RETRY_S)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.feed.tick()

    async def _expire_files(self) -> None:
        """Delete files at the end of their lives, if no batch reads them."""
        while True:
            files = await self._in_thread(self._store.files)
            running = await self._in_thread(self._store.running)
            kept = ids_of([batch for _, batch in running])
            for _, file in files:
                late = file.expires_at is not None and file.expires_at <= time.time()
                if late and file.id not in kept:
                    with contextlib.suppress(OSError):  # the next start removes its content
                        await self._remove_file(file.id)
            await asyncio.sleep(EXPIRY_S)


def _final(batch: Batch, now: int) -> Batch:
    """A finalized batch in its final state."""
    if batch.failed_at is not None:
        return replace(batch, status=Status.FAILED)
    if batch.expired_at is not None:
        return replace(batch, status=Status.EXPIRED)
    if batch.cancelling_at is not None:
        return replace(batch, status=Status.CANCELLED, cancelled_at=now)
    return replace(batch, status=Status.COMPLETED, completed_at=now)


class _Sink:
    """Passes replies on to the feed, and notes that servers answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def begin(self) -> None:
        self._service.servers_error = None
        self._service.feed.begin()

    def settle(self, line: Line, reply: Reply) -> None:
        self._service.feed.settle(line, reply)
