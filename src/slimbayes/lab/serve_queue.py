"""Requests that wait for a model: joined into batches, refused when the wait would be too long, none lost.

One thread runs the model. While it works, requests gather; then all that ask for the same draws go together. How long
a new request would wait follows from the work before it and the pace of late, which rises as batches grow.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from slimbayes.lab.serve_model import Columns, Served


class Busy(Exception):
    """More work waits than can be done in time."""


@dataclass
class Job:
    """Rows that one request asks about."""

    rows: np.ndarray
    draws: int
    level: float | None
    answer: asyncio.Future[Columns]

    @property
    def kind(self) -> tuple[int, float | None]:
        return self.draws, self.level


class Queue:
    """A model's waiting line.

    Args:
        most_rows: of one batch.
        patience: seconds that an accepted request should wait at most.
    """

    def __init__(self, model: Served, most_rows: int = 1024, patience: float = 0.25) -> None:
        self.model, self.most_rows, self.patience = model, most_rows, patience
        self.jobs: deque[Job] = deque()
        self.ready = asyncio.Event()
        self.waiting = 0.0  # rows x draws that wait or run
        self.accepted = self.answered = 0
        self.pace = 1e4  # rows x draws in a second, as measured of late
        self.thread = ThreadPoolExecutor(1, "model")

    async def ask(self, rows: np.ndarray, draws: int, level: float | None) -> Columns:
        """Predictions of some rows; raises Busy instead of waiting too long."""
        work = len(rows) * draws
        if self.waiting and (self.waiting + work) / self.pace > self.patience:
            raise Busy
        job = Job(rows, draws, level, asyncio.get_running_loop().create_future())
        self.jobs.append(job)
        self.waiting += work
        self.accepted += 1
        self.ready.set()
        try:
            return await job.answer
        finally:
            self.waiting -= work
            self.answered += 1

    async def work(self) -> None:
        """Answer requests for ever; run as a task."""
        while True:
            await self.ready.wait()
            batch = self._next()
            if not self.jobs:
                self.ready.clear()
            if batch:
                await self._answer(batch)

    def _next(self) -> list[Job]:
        """The first job, and others like it as far as they fit; those whose client is gone are dropped."""
        batch: list[Job] = []
        rest: deque[Job] = deque()
        rows = 0
        for job in self.jobs:
            if job.answer.done():
                continue
            fits = not batch or (job.kind == batch[0].kind and rows + len(job.rows) <= self.most_rows)
            (batch if fits else rest).append(job)
            rows += len(job.rows) if fits else 0
        self.jobs = rest
        return batch

    async def _answer(self, batch: list[Job]) -> None:
        start, work = time.perf_counter(), sum(len(job.rows) * job.draws for job in batch)
        try:
            found = await self._run(np.concatenate([job.rows for job in batch]), batch[0])
        except Exception as error:
            if len(batch) > 1:  # one request's rows are no reason to fail another's
                for job in batch:
                    await self._answer([job])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        self.pace += 0.3 * (work / (time.perf_counter() - start) - self.pace)
        first = 0
        for job in batch:
            last = first + len(job.rows)
            if not job.answer.done():
                job.answer.set_result({name: values[first:last] for name, values in found.items()})
            first = last

    async def _run(self, rows: np.ndarray, like: Job) -> Columns:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self.model.predict, rows, like.draws, like.level)
