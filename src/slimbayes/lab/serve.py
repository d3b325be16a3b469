"""A model over HTTP: `slimbayes serve RUN_OR_EXPORT`.

POST /predict    rows as JSON {"rows": [[...], ...], "draws": 16, "level": 0.9}, as .npy or as Arrow; of a run on a
                 table of one's own by column's name, [{"size": 80, "town": "north"}, ...]
GET  /about      what the model takes;  GET /metrics  for Prometheus;  GET /openapi.json  the interface
GET  /healthz    200 while it serves: the only address that needs no key

Answers are JSON, or Arrow or .npy where that is accepted. 4xx says what is wrong with a request, 503 with Retry-After
that too many wait. Of what comes over the network nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException as StarletteError

from slimbayes.errors import cut
from slimbayes.lab.serve_model import Served, open_model
from slimbayes.lab.serve_queue import Busy, Guard, Queue
from slimbayes.lab.serve_rows import ARROW, JSON, NPY, answer, asked

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_OPTIONS = {
    "draws": {"type": "integer", "minimum": 1},
    "level": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
}
_BODY = {
    "parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in _OPTIONS.items()],
    "requestBody": {"required": True, "content": {NPY: _BINARY, ARROW: _BINARY, JSON: {"schema": {
        "type": "object", "required": ["rows"], "additionalProperties": False,
        "properties": {"rows": {"type": "array"}, **_OPTIONS}}}}},
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a server takes: bytes of a body, rows and draws of a request, and seconds to wait in the queue, for a body
    to arrive, and for an answer."""

    body: int = 1 << 20
    rows: int = 1024
    draws: int = 64
    wait: float = 0.25
    arrive: float = 10.0
    answer: float = 30.0


class Metrics:
    """Counts for Prometheus, of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Gauge(
            "slimbayes_requests", "Requests by status, since the start", ["status"], registry=self.registry
        )
        self.rows = Counter("slimbayes_rows", "Rows predicted", registry=self.registry)
        self.seconds = Histogram("slimbayes_seconds", "Seconds of predictions", registry=self.registry)
        self.waiting = Gauge("slimbayes_waiting", "Rows times draws that wait or run", registry=self.registry)


def build_app(model: Served, limits: Limits = Limits(), key: str | None = None) -> Guard:  # noqa: B008 (immutable)
    """The application of one model, for uvicorn or a test client."""
    queue, metrics = Queue(model, limits.rows, limits.wait), Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(queue.work())
        yield
        worker.cancel()
        queue.thread.shutdown(wait=False)
        print(f"{queue.answered} of {queue.accepted} accepted requests were answered.", file=sys.stderr)

    app = FastAPI(title="slimbayes", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    guard = Guard(app, key, limits.wait)

    @app.exception_handler(StarletteError)
    async def told(request: Request, error: StarletteError) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/about")
    async def about() -> dict[str, Any]:
        most = {"body": limits.body, "rows": limits.rows, "draws": limits.draws}
        return {"row": list(model.row), "columns": model.columns, "draws": model.draws, "limits": most}

    @app.get("/metrics")
    async def show() -> Response:
        metrics.waiting.set(queue.waiting)
        for status, count in guard.statuses.items():
            metrics.requests.labels(status).set(count)
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    @app.get("/openapi.json")
    async def interface() -> dict[str, Any]:
        return app.openapi()

    @app.post("/predict", openapi_extra=_BODY)
    async def predict(request: Request) -> Response:
        start = time.perf_counter()
        body, kind = await body_of(request, limits), request.headers.get("content-type", "")
        (rows, notes), draws, level = asked(body, kind, request.query_params, model, limits.rows, limits.draws)
        try:
            found = await asyncio.wait_for(queue.ask(rows, draws, level), limits.answer)
        except Busy:
            raise HTTPException(503, "Too many requests wait: try again soon.", {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(503, "The answer took too long: ask for less.", {"Retry-After": "5"}) from None
        except (ValueError, FloatingPointError) as error:
            raise HTTPException(422, cut(str(error))) from error
        metrics.rows.inc(len(rows))
        metrics.seconds.observe(time.perf_counter() - start)
        content, kind = answer(found, request.headers.get("accept", ""), notes)
        told = {"X-Notes": json.dumps(notes)} if notes else None
        return Response(content, media_type=kind, headers=told)

    return guard


async def body_of(request: Request, limits: Limits) -> bytes:
    """A request's body, refused as soon as it is too long or too slow, whatever its headers say."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.arrive):
            async for part in request.stream():
                size += len(part)
                if size > limits.body:
                    raise HTTPException(413, f"A body may have {limits.body:,} bytes.", {"Connection": "close"})
                parts.append(part)
    except TimeoutError:
        raise HTTPException(408, "The body did not arrive in time.", {"Connection": "close"}) from None
    return b"".join(parts)


def serve(
    path: Path, host: str, port: int, limits: Limits, key: str | None, draws: int = 16, accelerator: Any = "auto"
) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that were accepted are answered first."""
    if key is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(f"{host} can be reached by others, so a key is needed: set SLIMBAYES_API_KEY or --key-file.")
    app = build_app(open_model(path, draws, accelerator), limits, key)
    uvicorn.run(
        app, host=host, port=port, log_level="error", http="h11", timeout_keep_alive=30, timeout_graceful_shutdown=8
    )
