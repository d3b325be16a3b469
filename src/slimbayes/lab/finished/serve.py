"""A model over HTTP: `slimbayes serve RUN_OR_EXPORT`.

POST /predict    rows as JSON {"rows": [[...], ...], "draws": 16, "level": 0.9}, as .npy or as Arrow; of a run on a
                 table of one's own by column's name, [{"size": 80, "town": "north"}, ...]
GET  /about      what the model takes;  GET /metrics  for Prometheus;  GET /openapi.json  the interface
GET  /healthz    200 while it serves: the only address that needs no key

Answers are JSON, or Arrow or .npy where that is accepted. 4xx says what is wrong with a request, 503 with Retry-After
that too many wait. Of what comes over the network nothing is unpickled.

One thread runs the model. While it works, requests gather; then all that ask for the same draws go together. How long
a new request would wait follows from the work before it and the pace of late, which rises as batches grow.

Before that stands a guard. The number it lets in follows the time they take, as TCP's window does: while it is reached,
a little more after each that was answered in time, and one more after each that was answered at once; a tenth less
after each that was late. So an overloaded server says 503 instead of being late for everyone, whatever takes the time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client as prometheus
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimbayes.errors import cut
from slimbayes.lab.finished.predict_file import Columns
from slimbayes.lab.finished.serve_model import Served, open_model
from slimbayes.lab.finished.serve_rows import (
    BODY,
    Limits,
    body_of,
    read_request,
    write_answer,
)

_FEWEST, _MOST = 2.0, 512.0  # requests that are let in together
_BUSY = "Too many requests wait: try again soon."


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
    """A model's waiting line: batches have `most_rows`, an accepted request should wait `patience` seconds at most."""

    def __init__(
        self, model: Served, most_rows: int = 1024, patience: float = 0.25
    ) -> None:
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
            fits = not batch or (
                job.kind == batch[0].kind and rows + len(job.rows) <= self.most_rows
            )
            (batch if fits else rest).append(job)
            rows += len(job.rows) if fits else 0
        self.jobs = rest
        return batch

    async def _answer(self, batch: list[Job]) -> None:
        start, work = (
            time.perf_counter(),
            sum(len(job.rows) * job.draws for job in batch),
        )
        try:
            rows, loop = (
                np.concatenate([job.rows for job in batch]),
                asyncio.get_running_loop(),
            )
            found = await loop.run_in_executor(
                self.thread, self.model.predict, rows, *batch[0].kind
            )
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
                job.answer.set_result(
                    {name: values[first:last] for name, values in found.items()}
                )
            first = last


class Guard:
    """An ASGI application around another. `key` is what X-API-Key must be, None lets everyone in; `wait` the seconds in
    which requests should be answered. /healthz is always open."""

    def __init__(self, app: ASGIApp, key: str | None, wait: float) -> None:
        self.app, self.key, self.wait = app, key, wait
        self.active, self.window = 0, 16.0
        self.statuses: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"] != "/healthz" and not self._admitted(scope):
            await self._refuse(
                scope, receive, send, 401, "A valid key is needed: X-API-Key."
            )
        elif self.active >= self.window and scope["path"] == "/predict":
            await asyncio.sleep(
                self.wait
            )  # who asks again at once would take the time of those let in
            await self._refuse(scope, receive, send, 503, _BUSY, {"Retry-After": "1"})
        else:
            await self._let_in(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.active += 1
        try:
            await self.app(scope, receive, noted)
        finally:
            self.active -= 1
            self.statuses[status] += 1
            if status == 200:
                self._learn(time.perf_counter() - start)

    def _learn(self, seconds: float) -> None:
        """Let in more or fewer after one that took so long."""
        if seconds > self.wait:
            self.window = max(_FEWEST, 0.9 * self.window)
        elif (
            self.active + 1 >= self.window - 1
        ):  # that few are quick says nothing of many
            self.window = min(
                _MOST, self.window + (1 if seconds < self.wait / 4 else 1 / self.window)
            )

    async def _refuse(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        status: int,
        why: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.statuses[status] += 1
        await JSONResponse({"error": why}, status, headers)(scope, receive, send)

    def _admitted(self, scope: Scope) -> bool:
        given = next(
            (value for name, value in scope["headers"] if name == b"x-api-key"), b""
        )
        return self.key is None or hmac.compare_digest(given, self.key.encode())


# --- the application ---


def build_app(
    model: Served,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    key: str | None = None,
) -> Guard:
    """The application of one model, for uvicorn or a test client."""
    queue, counts = (
        Queue(model, limits.rows, limits.wait),
        prometheus.CollectorRegistry(),
    )
    told = "Requests by status, since the start"
    requests = prometheus.Gauge("slimbayes_requests", told, ["status"], registry=counts)
    predicted = prometheus.Counter("slimbayes_rows", "Rows predicted", registry=counts)
    seconds = prometheus.Histogram(
        "slimbayes_seconds", "Seconds of predictions", registry=counts
    )
    waiting = prometheus.Gauge(
        "slimbayes_waiting", "Rows times draws that wait or run", registry=counts
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(queue.work())
        yield
        worker.cancel()
        queue.thread.shutdown(wait=False)
        print(
            f"{queue.answered} of {queue.accepted} accepted requests were answered.",
            file=sys.stderr,
        )

    app = FastAPI(title="slimbayes", docs_url=None, redoc_url=None, lifespan=lifespan)
    guard = Guard(app, key, limits.wait)

    @app.exception_handler(StarletteError)
    async def refusal(request: Request, error: StarletteError) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/about")
    async def about() -> dict[str, Any]:
        most = {"body": limits.body, "rows": limits.rows, "draws": limits.draws}
        return {
            "row": list(model.row),
            "columns": model.columns,
            "draws": model.draws,
            "limits": most,
        }

    @app.get("/metrics")
    async def show() -> Response:
        waiting.set(queue.waiting)
        for status, count in guard.statuses.items():
            requests.labels(status).set(count)
        return Response(
            prometheus.generate_latest(counts), media_type="text/plain; version=0.0.4"
        )

    @app.post("/predict", openapi_extra=BODY)
    async def predict(request: Request) -> Response:
        start = time.perf_counter()
        body, kind = (
            await body_of(request, limits),
            request.headers.get("content-type", ""),
        )
        rows, notes, draws, level = read_request(
            body, kind, request.query_params, model, limits
        )
        try:
            found = await asyncio.wait_for(queue.ask(rows, draws, level), limits.answer)
        except Busy:
            raise HTTPException(503, _BUSY, {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(
                503, "The answer took too long: ask for less.", {"Retry-After": "5"}
            ) from None
        except (ValueError, FloatingPointError) as error:
            raise HTTPException(422, cut(str(error))) from error
        predicted.inc(len(rows))
        seconds.observe(time.perf_counter() - start)
        content, kind = write_answer(found, request.headers.get("accept", ""), notes)
        return Response(
            content,
            media_type=kind,
            headers={"X-Notes": json.dumps(notes)} if notes else None,
        )

    return guard


def serve(
    path: Path,
    host: str,
    port: int,
    limits: Limits,
    key: str | None,
    draws: int = 16,
    accelerator: Any = "auto",
) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that were accepted are answered first."""
    if key is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(
            f"{host} can be reached by others, so a key is needed: set SLIMBAYES_API_KEY or --key-file."
        )
    app = build_app(open_model(path, draws, accelerator), limits, key)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="error",
        http="h11",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=8,
    )
