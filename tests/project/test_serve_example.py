"""examples/serve.py answers as `predict` does, and refuses in words what it cannot answer."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import slimbayes as sb

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette.testclient", exc_type=(ImportError, RuntimeError))
from fastapi.testclient import TestClient

FILE = Path(__file__).parents[2] / "examples" / "serve.py"
ROWS = [[0.1, 2.0, -1.3, 0.4], [1.0, 0.0, 0.5, -2.0]]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("script_serve", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(example: ModuleType) -> nn.Module:
    return sb.bayesianize(example.build_network(), sb.Rank1(members=2))


@pytest.fixture
def server(example: ModuleType, model: nn.Module) -> Iterator[TestClient]:
    app = example.create_app(model)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def test_a_saved_posterior_is_served(
    example: ModuleType,
    model: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = sb.save(model, tmp_path / "posterior")
    started: dict[str, Any] = {}

    def run(app: Any, host: str, port: int) -> None:
        started.update(app=app, host=host, port=port)

    monkeypatch.setattr(example.uvicorn, "run", run)
    monkeypatch.setattr(sys, "argv", ["serve.py", str(folder), "--port", "8123"])
    example.main()
    assert (started["host"], started["port"]) == ("127.0.0.1", 8123)
    answer = TestClient(started["app"]).post("/predict", json={"rows": ROWS})
    expected = sb.predict(model.eval(), torch.tensor(ROWS), draws=16, seed=0)
    torch.testing.assert_close(torch.tensor(answer.json()["probs"]), expected.probs)
    torch.testing.assert_close(torch.tensor(answer.json()["entropy"]), expected.entropy)
    assert answer.json()["label"] == expected.label.tolist()


def test_a_row_gets_the_same_answer_alone_and_among_others(server: TestClient) -> None:
    together = server.post("/predict", json={"rows": ROWS}).json()
    alone = server.post("/predict", json={"rows": ROWS[1:]}).json()
    assert together["probs"][1] == pytest.approx(alone["probs"][0], abs=1e-6)
    assert together["epistemic"][1] == pytest.approx(alone["epistemic"][0], abs=1e-6)


def test_real_targets_have_a_mean_and_a_deviation(example: ModuleType) -> None:
    net = sb.bayesianize(nn.Linear(example.FEATURES, 1), sb.Rank1(members=2))
    client = TestClient(example.create_app(net, "gaussian"))
    answer = client.post("/predict", json={"rows": ROWS}).json()
    expected = sb.predict(
        net, torch.tensor(ROWS), draws=16, likelihood="gaussian", seed=0
    )
    torch.testing.assert_close(torch.tensor(answer["mean"]), expected.mean)
    torch.testing.assert_close(torch.tensor(answer["std"]), expected.std)


def test_health_is_answered(server: TestClient) -> None:
    answer = server.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"", 422, "Field required"),
        (b"{", 422, "JSON decode error"),
        (b"[" * 100_000, 400, "error parsing the body"),
        (b"[1]", 422, "body"),
        (b'{"rows": []}', 422, "at least 1 item"),
        (b'{"rows": 3}', 422, "body.rows"),
        (b'{"rows": [[1, 2, 3]]}', 422, "Row 0 has 3 numbers, expected 4."),
        (b'{"rows": [[1, 2, 3, 4], [1]]}', 422, "Row 1 has 1 numbers"),
        (b'{"rows": [["a", 2, 3, 4]]}', 422, "body.rows.0.0"),
        (b'{"rows": [[null, 2, 3, 4]]}', 422, "valid number"),
        (b'{"rows": [[NaN, 2, 3, 4]]}', 422, "finite number"),
        (b'{"rows": [[1e999, 2, 3, 4]]}', 422, "finite number"),
        (b'{"rows": [[1e39, 2, 3, 4]]}', 422, "inf"),
        (b'{"rows": [[1, 2, 3, 4]], "draws": 1000000}', 422, "body.draws"),
        (json.dumps({"rows": [[1, 2, 3, 4]] * 1025}).encode(), 422, "at most 1024"),
        (b" " * 1_048_577, 413, "1,048,576 bytes"),
    ],
    ids=range(16),
)
def test_what_cannot_be_answered_is_refused_in_words(
    server: TestClient, body: bytes, status: int, told: str
) -> None:
    answer = server.post(
        "/predict", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    assert told in answer.json()["error"]
    assert len(answer.json()["error"]) < 300
    assert server.post("/predict", json={"rows": ROWS}).status_code == 200


def test_a_body_of_unknown_length_is_limited_too(server: TestClient) -> None:
    pieces = iter([b" " * 2**19] * 3)
    answer = server.post(
        "/predict", content=pieces, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413
    assert "1,048,576 bytes" in answer.json()["error"]


def test_an_unknown_address_is_named_as_such(server: TestClient) -> None:
    answer = server.get("/about")
    assert (answer.status_code, answer.json()) == (404, {"error": "Not Found"})


def test_a_posterior_of_other_weights_is_not_served(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    folder = sb.save(sb.bayesianize(other, sb.Rank1()), tmp_path / "posterior")
    monkeypatch.setattr(example.uvicorn, "run", lambda *args, **options: None)
    monkeypatch.setattr(sys, "argv", ["serve.py", str(folder)])
    with pytest.raises(sb.CheckpointError):
        example.main()
