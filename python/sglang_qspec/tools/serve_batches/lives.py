"""The life of each batch, from its creation to its final state.

A batch goes from state to state in one task. Each state is in the database before the next step
begins, and each step may be done twice, so a killed service goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from msgspec.structs import replace

from sglang_qspec.errors import BatchError, ClaimLostError
from sglang_qspec.policy import deadlines
from sglang_qspec.policy.deadlines import Due
from sglang_qspec.tools.batch.bucket import Bucket
from sglang_qspec.tools.batch.lines import Lines
from sglang_qspec.tools.batch.results import Results
from sglang_qspec.tools.batch.source import FileSource
from sglang_qspec.tools.serve_batches import usage
from sglang_qspec.tools.serve_batches.feed import Feed
from sglang_qspec.tools.serve_batches.files import Files
from sglang_qspec.tools.serve_batches.job import RETRY_S, Job
from sglang_qspec.tools.serve_batches.objects import (
    Batch,
    BatchStatus,
    Errors,
    FileObject,
    FilePurpose,
    LineError,
    RequestCounts,
    new_id,
)
from sglang_qspec.tools.serve_batches.state import State
from sglang_qspec.tools.serve_batches.tenants import Tenants

logger = logging.getLogger(__name__)

NAMES = ("{}_output.jsonl", "{}_error.jsonl")
"""Names of a batch's files of answers and of failures."""


class Lives:
    """Takes batches from state to state."""

    def __init__(
        self,
        state: State,
        files: Files,
        feed: Feed,
        tenants: Tenants,
        tell: Callable[[Batch], Awaitable[None]],
        *,
        strict_deadlines: bool = False,
        bucket: Bucket | None = None,
    ) -> None:
        """`tell` is called with a batch that has reached its final state.

        With `strict_deadlines` a batch fails that cannot be done in time. `bucket` gets copies of
        the records of ended batches.
        """
        self._state, self._files, self._feed, self._tenants = state, files, feed, tenants
        self._strict, self._bucket = strict_deadlines, bucket
        self._tell = tell

    async def serve(self, tenant: str, batch: Batch) -> None:
        """Take a batch from its present state to a final one, whatever the disk does meanwhile.

        If another gateway has taken the batch, that one does it.
        """
        while True:
            try:
                batch = await self._live(tenant, batch.id)
            except ClaimLostError as error:
                logger.info("%s", error)
                return
            except (BatchError, OSError) as error:
                logger.error("%s waits: %s", batch.id, error)
                await asyncio.sleep(RETRY_S)
            else:
                break
        logger.info("%s is %s", batch.id, batch.status.value)
        await self._tell(batch)

    async def _live(self, tenant: str, id: str) -> Batch:
        """Serve a batch from the state that the database has; returns it in its final state.

        Raises BatchError and OSError if the disk does not take the records.
        """
        batch = await self._state.change(tenant, id, lambda batch: batch)
        if batch.status is BatchStatus.VALIDATING:
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
        tokens = (lines.total or 0) * self._feed.usual_tokens
        planned = self._feed.seconds(tokens, batch.expires_at)

        def change(batch: Batch) -> Batch:
            if batch.status is not BatchStatus.VALIDATING:
                return batch
            if errors:
                found = Errors(data=errors)
                return replace(batch, status=BatchStatus.FAILED, failed_at=now, errors=found)
            figures = replace(batch.qspec, planned_seconds=planned)
            status = BatchStatus.IN_PROGRESS
            counts = RequestCounts(total=lines.total or 0)
            return replace(
                batch, status=status, in_progress_at=now, qspec=figures, request_counts=counts
            )

        return await self._state.change(tenant, batch.id, change)

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
        work = Due(tenant, batch.expires_at, total * self._feed.usual_tokens)
        due = sorted([*self._feed.due(), work], key=lambda each: each.deadline)
        load = deadlines.load(due, self._feed.speed.rate, time.time())
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
                job.stop(BatchStatus.EXPIRED)
            self._feed.add(job)
            stack.callback(self._feed.remove, job)
            batch = await self._state.change(tenant, batch.id, lambda batch: batch)
            if batch.status is BatchStatus.CANCELLING:  # before the feed had the job
                job.stop(BatchStatus.CANCELLED)
            await job.over.wait()
            if job.was_dropped:
                raise BatchError("another gateway may serve it")
            if job.stopped_as is BatchStatus.EXPIRED:
                reason = "the request could not be answered before the completion window expired"
                await job.leave_out("batch_expired", reason)
        now = int(time.time())
        counts, figures = job.counts, job.figures()

        def change(batch: Batch) -> Batch:
            if job.stopped_as is BatchStatus.EXPIRED:
                batch = replace(batch, expired_at=now)
            if job.stopped_as is BatchStatus.FAILED:
                error = LineError(code="file_unreadable", message=job.waits_for or "")
                batch = replace(batch, failed_at=now, errors=Errors(data=[error]))
            cancelled = batch.status is BatchStatus.CANCELLING
            return replace(
                batch,
                status=batch.status if cancelled else BatchStatus.FINALIZING,
                finalizing_at=now,
                request_counts=counts,
                output_file_id=new_id("file-") if counts.completed else None,
                error_file_id=new_id("file-") if counts.failed else None,
                qspec=replace(
                    figures,
                    planned_seconds=batch.qspec.planned_seconds,
                    waits_for=None,
                    tokens_per_second=None,
                ),
            )

        return await self._state.change(tenant, batch.id, change)

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
            file = FileObject(
                id=id,
                bytes=await asyncio.to_thread(self._files.keep, path, id),
                created_at=now,
                filename=name.format(batch.id),
                purpose=FilePurpose.OUTPUT,
                expires_at=None if life is None else now + life,
            )
            if self._bucket is not None:
                kept, object = self._files.path(id), object_name(tenant, file)
                await asyncio.to_thread(self._bucket.put, kept, object)
            added.append(file)
        if batch.output_file_id is not None:
            path = self._files.path(batch.output_file_id)
            batch = replace(batch, usage=await asyncio.to_thread(usage.of, path))
        return await self._state.change(tenant, batch.id, lambda _: _final(batch, now), *added)


def object_name(tenant: str, file: FileObject) -> str:
    """The name of a file's copy in a bucket."""
    return f"{quote(tenant, safe='')}/{file.filename}".lstrip("/")


def _final(batch: Batch, now: int) -> Batch:
    """A finalized batch in its final state."""
    if batch.failed_at is not None:
        return replace(batch, status=BatchStatus.FAILED)
    if batch.expired_at is not None:
        return replace(batch, status=BatchStatus.EXPIRED)
    if batch.cancelling_at is not None:
        return replace(batch, status=BatchStatus.CANCELLED, cancelled_at=now)
    return replace(batch, status=BatchStatus.COMPLETED, completed_at=now)
