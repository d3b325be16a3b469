"""Serve a saved posterior over HTTP with FastAPI: load it once, answer rows as JSON.

    pip install slimbayes fastapi uvicorn
    python examples/serve.py posterior/          # a folder that sb.save wrote
    curl localhost:8000/predict -H 'content-type: application/json' \
        -d '{"rows": [[0.1, 2.0, -1.3, 0.4]]}'

Copy this file, and replace `build_network` by the function that builds your network
and loads the weights that the posterior was trained on.
"""

import argparse
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from starlette.exceptions import HTTPException as HTTPError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import nn

import slimbayes as sb

FEATURES = 4
DRAWS = 16  # forward passes
MAX_ROWS = 1024
MAX_BYTES = 1 << 20


def build_network() -> nn.Module:
    """Build the plain network, without a posterior."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 3))


class Rows(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")
    rows: list[list[FiniteFloat]] = Field(min_length=1, max_length=MAX_ROWS)


class BodyLimit:
    """ASGI middleware that refuses a body as soon as it has more than `MAX_BYTES`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def receive_within_limit() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BYTES:
                raise HTTPException(413, f"A body may have {MAX_BYTES:,} bytes.")
            return message

        await self.app(scope, receive_within_limit, send)


def as_json(prediction: sb.Prediction) -> dict[str, list[Any]]:
    """Convert a prediction to lists with one entry for each row."""
    if prediction.discrete:
        names = ("probs", "label", "entropy", "epistemic")
    else:
        names = ("mean", "std", "epistemic")
    return {name: getattr(prediction, name).tolist() for name in names}


def create_app(model: nn.Module, likelihood: str = "categorical") -> FastAPI:
    """Create the application of one converted model, which its threads share."""
    model.eval()
    app = FastAPI(title="slimbayes")
    app.add_middleware(BodyLimit)

    @app.exception_handler(HTTPError)
    def tell_error(request: Request, error: HTTPError) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    def tell_fault(request: Request, error: RequestValidationError) -> JSONResponse:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        return JSONResponse({"error": f"{place}: {fault['msg']}"}, 422)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/predict")
    def predict(body: Rows) -> dict[str, list[Any]]:
        for index, row in enumerate(body.rows):
            if len(row) != FEATURES:
                told = f"Row {index} has {len(row)} numbers, expected {FEATURES}."
                raise HTTPException(422, told)
        x = torch.tensor(body.rows)
        try:
            prediction = sb.predict(
                model, x, draws=DRAWS, likelihood=likelihood, seed=0
            )
        except (ValueError, FloatingPointError) as error:  # rows beyond float32
            raise HTTPException(422, str(error)) from error
        return as_json(prediction)

    return app


def main() -> None:
    """Load a posterior and serve it on this machine."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("posterior", help="folder that sb.save wrote")
    parser.add_argument("--likelihood", default="categorical")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    model = sb.load(build_network(), args.posterior)
    uvicorn.run(create_app(model, args.likelihood), host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
