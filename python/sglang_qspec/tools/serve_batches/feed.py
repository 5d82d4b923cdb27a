"""Hands the lines of all running batches to the servers, and the replies back to the batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from sglang_qspec.policy import deadlines
from sglang_qspec.policy.deadlines import Due, Lengths, Shares, Speed
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.server import Reply, ReplyKind
from sglang_qspec.tools.serve_batches.job import Job
from sglang_qspec.tools.serve_batches.objects import BatchStatus

LINES_AHEAD = 8
"""Lines that were chosen and that no server has yet. With few of them a batch that becomes urgent
is served soon; more would be needed only if choosing were slow."""


class Feed:
    """The lines of all jobs as the input of a `Runner`, of which it is the sink.

    The Runner knows lines by numbers and custom_ids of the feed's own, which no two lines share.
    So a text that was written for one batch is never a guess for another one.
    """

    def __init__(self, expected: float = 0.0) -> None:
        """`expected` is that of `Speed`."""
        self.speed = Speed(expected=expected)
        self._jobs: dict[str, Job] = {}
        self._asked: dict[int, tuple[Job, Line]] = {}
        """Job and own line of each line that the Runner has."""
        self._number = 0
        self._shares, self._lengths = Shares(), Lengths()
        self._changed = asyncio.Event()
        self._since = time.monotonic()
        self._tokens = 0

    def add(self, job: Job) -> None:
        """Serve a job from now on."""
        self._jobs[job.id] = job
        self._changed.set()

    def remove(self, job: Job) -> None:
        """The job is over."""
        self._jobs.pop(job.id, None)

    @property
    def jobs(self) -> list[Job]:
        """The running jobs."""
        return [*self._jobs.values()]

    def job(self, id: str) -> Job | None:
        """The running job of a batch."""
        return self._jobs.get(id)

    def due(self, but: str | None = None) -> list[Due]:
        """What is left to do, in the order of the deadlines, without the tenant's batch `but`."""
        usual = self._lengths.mean()
        found = [
            Due(job.tenant, job.deadline, job.left * job.lengths.mean(usual))
            for job in self._jobs.values()
            if job.id != but
        ]
        return sorted(found, key=lambda each: each.deadline)

    def seconds(
        self, tokens: float, deadline: float, but: str | None = None, usual: float = 0.0
    ) -> float | None:
        """Expected time for some tokens that are due at a deadline, if batches are served by these.

        None if no speed is known: that of the servers, or `usual`, because the servers' speed is
        measured only while lines wait here. The batch `but` does not come before.
        """
        rate = self.speed.rate or usual
        before = sum(each.tokens for each in self.due(but) if each.deadline <= deadline)
        return round((before + tokens) / rate, 1) if rate else None

    @property
    def usual_tokens(self) -> float:
        """Mean output tokens of an answer of all batches."""
        return self._lengths.mean()

    async def lines(self) -> AsyncIterator[Line]:
        """The lines, for ever: each time of the job that `policy.deadlines` chooses."""
        while True:
            job = self._choose()
            if job is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            line = await job.read()
            if line is not None:
                self._number += 1
                self._asked[self._number] = (job, line)
                name = f"{job.id}/{line.custom_id}"
                yield replace(line, number=self._number, custom_id=name)

    def _choose(self) -> Job | None:
        jobs = [job for job in self._jobs.values() if job.has_lines]
        if not jobs:
            return None
        usual = self._lengths.mean()
        lengths = [job.lengths.mean(usual) for job in jobs]
        waiting = [
            Due(job.tenant, job.deadline, job.left * length)
            for job, length in zip(jobs, lengths, strict=True)
        ]
        index = deadlines.choose(waiting, self._shares.tokens, self.speed.rate, time.time())
        self._shares.observe(jobs[index].tenant, lengths[index])
        return jobs[index]

    def begin(self) -> None:
        """The servers are open."""
        self._since, self._tokens = time.monotonic(), 0

    def settle(self, line: Line, reply: Reply) -> bool:
        """Pass a reply on to its job; returns whether that still waits for it."""
        job, own = self._asked.pop(line.number)
        if job.over.is_set():
            return False
        if reply.kind is ReplyKind.ANSWERED:
            self._tokens += reply.tokens
            self._lengths.observe(reply.tokens)
        job.settle(own, reply)
        if job.has_lines:
            self._changed.set()
        return True

    def tick(self) -> None:
        """Measure the speed, end what is late, and try refused records again; once a second."""
        now = time.monotonic()
        seconds, tokens = now - self._since, self._tokens
        self._since, self._tokens = now, 0
        if self._asked and any(job.has_lines for job in self._jobs.values()):
            self.speed.observe(tokens, seconds)
        self._shares.fade(seconds)
        for job in self._jobs.values():
            if job.deadline <= time.time():
                job.stop(BatchStatus.EXPIRED)
            job.tick(seconds)
            if job.has_lines:
                self._changed.set()

    def take_back(self) -> None:
        """The Runner has ended: all lines that it had are asked again."""
        self._asked.clear()
        for job in self._jobs.values():
            job.rewind()
        self._changed.set()

    def over(self, line: Line) -> asyncio.Event:
        """Set when the job of a line that the Runner has is over."""
        return self._asked[line.number][0].over
