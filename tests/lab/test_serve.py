"""The server answers as predict does, whoever else asks, and refuses in words what it cannot answer."""

import asyncio
import io
import json
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lab_configs import BASE, CPU, call
from torch import nn

import slimbayes as sb
from slimbayes.data import Dataset, Split
from slimbayes.lab.configs.files import merged, validate
from slimbayes.lab.configs.own import OwnCodeError, code_allowed
from slimbayes.lab.finished.predict_file import as_columns
from slimbayes.lab.finished.serve_model import RunModel, Served, _array, open_model
from slimbayes.lab.runs.fit import fit
from slimbayes.lab.runs.folder import RunError
from slimbayes.lab.runs.trained import read_predictor

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette.testclient", exc_type=(ImportError, RuntimeError))
from fastapi.testclient import TestClient

from slimbayes.lab.finished.serve import Busy, Job, Limits, Queue, build_app, serve

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Using `httpx`"
)


class Doubles(Served):
    """A model that doubles its rows, slowly if asked, and fails at thirteen."""

    row, draws = (2,), 3

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.batches = seconds, []

    def check(self, rows: Any) -> tuple[np.ndarray, tuple[str, ...]]:
        if rows.shape[1:] != self.row or not np.isfinite(rows).all():
            raise ValueError(f"rows: finite rows of shape {self.row} are needed.")
        return rows, ()

    def predict(
        self, rows: np.ndarray, draws: int, level: float | None
    ) -> dict[str, np.ndarray]:
        self.batches.append((len(rows), draws))
        time.sleep(self.seconds)
        if (rows == 13).any():
            raise FloatingPointError("thirteen")
        return {"mean": 2 * rows[:, 0]}


def client(
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    key: str | None = None,
    model: Any = None,
) -> TestClient:
    return TestClient(
        build_app(model or Doubles(), limits, key), raise_server_exceptions=False
    )


def npy(array: np.ndarray, pickled: bool = False) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=pickled)
    return out.getvalue()


def test_json_and_npy_bodies() -> None:
    with client() as server:
        answer = server.post(
            "/predict", json={"rows": [[1, 5], [2, 5]], "draws": 4, "level": 0.5}
        )
        assert answer.status_code == 200 and answer.json() == {
            "predictions": {"mean": [2.0, 4.0]}
        }
        head = {"content-type": "application/x-npy"}
        assert (
            server.post("/predict", content=npy(np.ones((3, 2))), headers=head).json()[
                "predictions"
            ]["mean"]
            == [2.0] * 3
        )
        assert server.get("/healthz").status_code == 200
        assert server.get("/about").json()["row"] == [2]
        assert 'slimbayes_requests{status="200"} 4.0' in server.get("/metrics").text
        assert "/predict" in server.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "cannot be read"),
        (b"[" * 100_000, "nested deeper"),
        (b"[1]", 'an object with "rows"'),
        (b'{"rows": [[1, NaN]]}', "finite rows"),
        (b'{"rows": [[1, 1e999]]}', "finite rows"),
        (b'{"rows": [[1, 2], [3]]}', "cannot be read"),
        (b'{"rows": [["a", "b"]]}', "lists of numbers"),
        (b'{"rows": [[true, false]]}', "lists of numbers"),
        (b'{"rows": []}', "from 1 to 1,024 rows"),
        (b'{"rows": 3}', "from 1 to 1,024 rows"),
        (b'{"rows": [[1, 2]], "draws": 1000000000}', "from 1 to 64, got 1000000000"),
        (b'{"rows": [[1, 2]], "draws": true}', "draws must be"),
        (b'{"rows": [[1, 2]], "level": 1}', "strictly between"),
        (b'{"rows": [[1, 2]], "seed": 1}', "unknown key 'seed'"),
        (b'{"rows": [[1, 2]], "rows": [[1, 2]]}', "twice"),
        (b'{"rows": [[1, 2, 3]]}', "shape"),
        (b'{"rows": [[13, 2]]}', "thirteen"),
        (json.dumps({"rows": [[1, 2]] * 1025}).encode(), "from 1 to 1,024 rows"),
    ],
    ids=range(18),
)
def test_bodies_that_cannot_be_answered(body: bytes, told: str) -> None:
    with client() as server:
        answer = server.post(
            "/predict", content=body, headers={"content-type": "application/json"}
        )
        assert (
            answer.status_code == 422
            and told in answer.json()["error"]
            and len(answer.json()["error"]) < 400
        )
        assert server.post("/predict", json={"rows": [[1, 2]]}).status_code == 200


def test_other_bodies_are_refused() -> None:
    head = {"content-type": "application/x-npy"}
    with client(Limits(body=1000)) as server:
        evil = npy(np.array([{"a": 1}], dtype=object), pickled=True)
        lying = (
            npy(np.ones((3, 2)))
            .replace(b"(3, 2)", b"(999999999, 2)")
            .replace(b"       ", b"", 1)
        )
        assert b"999999999" in lying
        for body in (evil, b"\x93NUMPY", lying, npy(np.array(["a"])), b"PK\x03\x04"):
            assert (
                server.post("/predict", content=body, headers=head).status_code == 422
            )
        assert (
            server.post(
                "/predict", content=b"x", headers={"content-type": "text/csv"}
            ).status_code
            == 415
        )
        assert server.post("/predict", content=b"x" * 1001).status_code == 413
        assert (
            server.post("/predict", content=(b"x" * 100 for _ in range(11))).status_code
            == 413
        )
        assert (
            server.get("/nowhere").status_code == 404
            and server.get("/predict").status_code == 405
        )


STREAM = "application/vnd.apache.arrow.stream"


def stream(columns: dict[str, Any], **options: Any) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    table, out = arrow.table(columns), io.BytesIO()
    with arrow.ipc.new_stream(
        out, table.schema, options=arrow.ipc.IpcWriteOptions(**options)
    ) as writer:
        writer.write_table(table)
    return out.getvalue()


class Adds(Doubles):
    """Takes columns a and b by name."""

    def check(self, rows: Any) -> tuple[np.ndarray, tuple[str, ...]]:
        return super().check(_array(rows, ("a", "b")))


def test_arrow_goes_in_and_out() -> None:
    arrow = pytest.importorskip("pyarrow")
    with client(model=Adds()) as server:
        head = {"content-type": STREAM, "accept": STREAM}
        for columns in ({"b": [5.0, 6.0], "a": [1.0, 2.0]}, {"b": [5, 6], "a": [1, 2]}):
            got = server.post(
                "/predict?draws=4&level=0.5", content=stream(columns), headers=head
            )
            assert got.status_code == 200 and got.headers["content-type"] == STREAM
            assert arrow.ipc.open_stream(got.content).read_all().to_pydict() == {
                "mean": [2.0, 4.0]
            }
        assert server.post("/predict", json={"rows": [{"b": 1, "a": 3}]}).json()[
            "predictions"
        ]["mean"] == [6.0]
    listed = stream(
        {"x": arrow.array([[1.0, 5.0], [2.0, 5.0]], arrow.list_(arrow.float32(), 2))}
    )
    with client() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Doubles, "check", lambda self, rows: (_array(rows, ()), ()))
        got = server.post("/predict", content=listed, headers={"content-type": STREAM})
        assert got.json()["predictions"]["mean"] == [2.0, 4.0]


@pytest.mark.slow
def test_arrow_that_lies_is_refused() -> None:
    """Also what unpacks to more than it is: compressed, all null, or one long word in every row."""
    arrow = pytest.importorskip("pyarrow")
    nulls = arrow.nulls(1000)
    good = stream({"a": [1.0], "b": [2.0]})
    bodies = {
        "compressed": stream(
            {"a": np.zeros(100), "b": np.zeros(100)}, compression="zstd"
        ),
        "holds 'null'": stream({"a": nulls, "b": nulls}),
        "holds 'struct": stream({"a": arrow.array([{"x": 1}]), "b": [1]}),
        "holds 'list<item: null>'": stream({"a": arrow.array([[None]]), "b": [1]}),
        "missing: 'b'; not known to the run: 'c'": stream({"a": [1.0], "c": [1.0]}),
        "column 'a' must hold numbers": stream({"a": ["x"], "b": [1.0]}),
        "none may be missing": stream({"a": [None, 1.0], "b": [1.0, 2.0]}),
        "from 1 to 1,024 rows": stream({"a": np.zeros(1025), "b": np.zeros(1025)}),
        "no Arrow stream": good[:60],
        "rows are answered, got 0": stream({"a": np.zeros(0), "b": np.zeros(0)}),
    }
    head = {"content-type": STREAM}
    with client(Limits(body=1 << 16), model=Adds()) as server:
        for told, body in bodies.items():
            got = server.post("/predict", content=body, headers=head)
            assert got.status_code == 422 and told in got.json()["error"], (
                told,
                got.text,
            )
        draw = np.random.default_rng(0)
        for _ in range(150):
            bent = bytearray(good)
            for at in draw.integers(0, len(good), 3):
                bent[at] = draw.integers(256)
            assert server.post(
                "/predict", content=bytes(bent), headers=head
            ).status_code in (200, 422)
        assert (
            server.post("/predict?seed=1", content=good, headers=head).status_code
            == 422
        )
        assert (
            server.post(
                "/predict?draws=1000000000", content=good, headers=head
            ).status_code
            == 422
        )
        assert server.post("/predict", content=good, headers=head).status_code == 200


def test_only_the_pulse_is_open_without_the_key() -> None:
    with client(key="secret") as server:
        for path in ("/about", "/metrics", "/openapi.json", "/docs", "/nowhere"):
            for key in ("", "secre", "secretx", "SECRET"):
                assert server.get(path, headers={"x-api-key": key}).status_code == 401
        assert server.post("/predict", json={"rows": [[1, 2]]}).status_code == 401
        assert (
            server.post(
                "/predict", json={"rows": [[1, 2]]}, headers={"x-api-key": "secret"}
            ).status_code
            == 200
        )
        assert server.get("/healthz").status_code == 200
    with pytest.raises(ValueError, match="a key is needed"):
        serve(Path("run"), "0.0.0.0", 0, Limits(), None)


def together(
    model: Doubles, rows: list[list[list[float]]], patience: float = 10.0
) -> list[Any]:
    async def ask() -> list[Any]:
        queue = Queue(model, most_rows=8, patience=patience)
        worker = asyncio.create_task(queue.work())
        found = await asyncio.gather(
            *(queue.ask(np.array(r), 3, None) for r in rows), return_exceptions=True
        )
        worker.cancel()
        assert queue.waiting == 0 and queue.accepted == queue.answered
        return found

    return asyncio.run(ask())


def test_requests_are_joined_and_each_gets_its_own_answer() -> None:
    model = Doubles(0.01)
    found = together(model, [[[i, 0.0]] for i in range(20, 40)])
    assert [one["mean"] for one in found] == [[2.0 * i] for i in range(20, 40)]
    assert len(model.batches) < 6 and max(rows for rows, _ in model.batches) == 8


def test_one_request_s_failure_is_not_another_s() -> None:
    found = together(Doubles(), [[[1, 0.0]], [[13, 0.0]], [[2, 0.0]]])
    assert (
        found[0]["mean"] == [2.0]
        and found[2]["mean"] == [4.0]
        and isinstance(found[1], FloatingPointError)
    )


def test_more_than_can_be_done_in_time_is_refused() -> None:
    found = together(Doubles(0.01), [[[1, 0.0]] * 8 for _ in range(2000)], patience=0.1)
    refused = sum(isinstance(one, Busy) for one in found)
    assert 0 < refused < 2000 and all(
        isinstance(one, Busy) or list(one["mean"]) == [2.0] * 8 for one in found
    )


def test_a_full_queue_says_when_to_come_back() -> None:
    statuses: list[tuple[int, str | None]] = []
    with client(Limits(wait=1e-6), model=Doubles(0.3)) as server:

        def ask() -> None:
            answer = server.post("/predict", json={"rows": [[1, 2]]})
            statuses.append((answer.status_code, answer.headers.get("retry-after")))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(statuses) == {(200, None), (503, "1")}


def test_the_window_shrinks_while_answers_are_late_and_opens_again() -> None:
    app: Any = build_app(Doubles(0.02), Limits(wait=0.01, answer=5.0))
    with TestClient(app) as server:
        start = app.window
        for _ in range(5):
            server.post("/predict", json={"rows": [[1, 2]]})
        shrunk = app.window
        assert shrunk == pytest.approx(0.9**5 * start)
        for _ in range(
            5
        ):  # what is refused says nothing of what is answered, nor does one alone of many
            server.post("/predict", json={"rows": []})
        app.wait = 5.0
        server.post("/predict", json={"rows": [[1, 2]]})
        assert app.window == shrunk
        app.window = 2.0
        server.post("/predict", json={"rows": [[1, 2]]})
        assert app.window == 3.0
        app.window = 2.0
        app._learn(2.0)  # in time, but not at once
        assert app.window == 2.5
        app.active, app.wait = 1000, 0.1
        assert server.post("/predict", json={"rows": [[1, 2]]}).status_code == 503
        assert server.get("/healthz").status_code == 200


def run_of(folder: Path) -> Path:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data = Dataset(
        "mine",
        {
            "train": Split(x[:40], (x[:40, 0] > 0).long()),
            "test": Split(x[40:], (x[40:, 0] > 0).long()),
        },
    )
    config = validate(
        BASE | {"data": {"name": "mine"}, "model": {"kind": "mlp", "hidden": [4]}}
    )
    fit(config, folder, CPU, dataset=data)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec:FutureWarning", "ignore::UserWarning:torch.*"
)
def test_a_run_is_answered_as_predict_answers_it_alone_and_in_a_crowd(
    tmp_path: Path,
) -> None:
    folder = run_of(tmp_path / "run")
    rows = np.random.default_rng(0).normal(size=(5, 3))
    np.save(tmp_path / "rows.npy", rows.astype(np.float32))
    assert (
        call(
            "predict",
            str(folder),
            str(tmp_path / "rows.npy"),
            "-o",
            str(tmp_path / "out.json"),
            "--draws",
            "4",
        ).exit_code
        == 0
    )
    want = json.loads((tmp_path / "out.json").read_text())
    model = RunModel(folder, draws=4, accelerator="cpu")
    with client(model=model) as server:
        for part in (slice(0, 5), slice(2, 3)):
            got = server.post("/predict", json={"rows": rows[part].tolist()}).json()[
                "predictions"
            ]
            assert got["label"] == [row["label"] for row in want[part]]
            np.testing.assert_allclose(
                got["epistemic"], [row["epistemic"] for row in want[part]], atol=1e-6
            )
        assert server.post("/predict", json={"rows": [[1e39, 0, 0]]}).status_code == 422
    done = call(
        "export",
        folder,
        "--to",
        "pt2",
        "-o",
        tmp_path / "net.pt2",
        "--draws",
        4,
        "--accelerator",
        "cpu",
    )
    assert done.exit_code == 0, done.output
    probs, _, epistemic = torch.export.load(tmp_path / "net.pt2").module()(
        torch.tensor(rows).float()
    )
    np.testing.assert_allclose(
        probs.detach()[:, 0], [row["p(0)"] for row in want], atol=1e-5
    )
    np.testing.assert_allclose(
        epistemic.detach(), [row["epistemic"] for row in want], atol=1e-5
    )


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table whose target is in the millions."""
    return run_on_a_table(tmp_path_factory.mktemp("table"), 5e6)


def run_on_a_table(folder: Path, price: float, **train: object) -> Path:
    """A run on numbers, a category and dates."""
    lines = [
        f"{40 + i % 50},{('north', 'mid')[i % 2]},2024-0{i % 9 + 1}-11,{price + 100 * (i % 50) + i % 7}"
        for i in range(80)
    ]
    (folder / "a.csv").write_text("\n".join(["size,town,sold,price", *lines]))
    data = {
        "csv": str(folder / "a.csv"),
        "target": "price",
        "dates": "encode",
        "scaling": "standard",
    }
    tree = merged(BASE, {"train": train}) | {
        "data": data,
        "model": {"kind": "table_net", "hidden": [8]},
    }
    return fit(validate(tree), folder / "run", CPU, judge=False)


ROWS = [
    {"size": 60.0, "town": "mid", "sold": "2024-05-01"},
    {"size": 45.0, "town": "north", "sold": "2024-02-01"},
]


def predicted(run: Path, folder: Path, *words: object) -> list[dict[str, Any]]:
    """What the command says about the same rows."""
    (folder / "rows.csv").write_text(
        "town,size,sold\n"
        + "".join(f"{r['town']},{r['size']},{r['sold']}\n" for r in ROWS)
    )
    assert (
        call(
            "predict",
            run,
            folder / "rows.csv",
            "-o",
            folder / "out.json",
            "--draws",
            4,
            *words,
        ).exit_code
        == 0
    )
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
def test_a_run_on_a_table_is_served_by_its_columns_names(
    table_run: Path, tmp_path: Path
) -> None:
    want = predicted(table_run, tmp_path, "--level", 0.8)
    with client(model=RunModel(table_run, draws=4, accelerator="cpu")) as server:
        got = server.post("/predict", json={"rows": ROWS, "level": 0.8}).json()[
            "predictions"
        ]
        assert server.get("/about").json()["columns"] == {
            "size": "number",
            "town": "word",
            "sold": "date",
        }
        for name in ("mean", "std", "low", "high"):
            np.testing.assert_allclose(
                got[name], [row[name] for row in want], rtol=1e-6
            )
        assert 5e6 < got["low"][0] < got["mean"][0] < got["high"][0] < 5.01e6
        body = stream({name: [row[name] for row in ROWS] for name in ROWS[0]})
        again = server.post(
            "/predict?level=0.8", content=body, headers={"content-type": STREAM}
        ).json()["predictions"]
        assert again == got
        wrong = {
            "columns missing: 'town'": [{"size": 1, "sold": "2024-01-01"}],
            "not known to the run: 'colour'": [{**ROWS[0], "colour": "red"}],
            "holds 'east', a category that training did not see": [{**ROWS[0], "town": "east"}],
            "row 1, column 'size': 'large' is not a number": [ROWS[0], {**ROWS[1], "size": "large"}],
            "column 'size': 'True' is not a number": [{**ROWS[0], "size": True}],
            "values are missing in column 'size'": [{**ROWS[0], "size": None}],
            "'inf' is infinite": [{**ROWS[0], "size": float("inf")}],
            "column 'sold': 'soon' is no date": [{**ROWS[0], "sold": "soon"}],
            "row 1 lacks the column 'town'": [ROWS[0], {"size": 1, "sold": "2024-01-01"}],
            "each must have its columns' names": [[1.0, 0.0, 2.0]],
        }  # fmt: skip
        for told, rows in wrong.items():
            answer = server.post("/predict", content=json.dumps({"rows": rows}))
            assert answer.status_code == 422 and told in answer.json()["error"], (
                told,
                answer.text,
            )


@pytest.mark.slow
def test_answers_as_npy(table_run: Path, tmp_path: Path) -> None:
    accept = {"accept": "application/x-npy"}
    with client(model=RunModel(table_run, draws=2, accelerator="cpu")) as server:
        want = server.post("/predict", json={"rows": ROWS, "level": 0.8}).json()[
            "predictions"
        ]
        answer = server.post(
            "/predict", json={"rows": ROWS, "level": 0.8}, headers=accept
        )
        assert answer.headers["content-type"] == "application/x-npy"
        got = np.load(io.BytesIO(answer.content), allow_pickle=False)
        assert {
            name: got[name].tolist() for name in got.dtype.names
        } == want and "high" in want
    with client(
        model=RunModel(run_of(tmp_path / "run"), draws=2, accelerator="cpu")
    ) as server:
        want = server.post("/predict", json={"rows": [[0, 1, 2]]}).json()["predictions"]
        content = server.post(
            "/predict", json={"rows": [[0, 1, 2]]}, headers=accept
        ).content
        got = np.load(io.BytesIO(content), allow_pickle=False)
        assert {
            name: got[name].tolist() for name in got.dtype.names
        } == want and isinstance(want["label"][0], str)


@pytest.mark.slow
def test_categories_that_training_did_not_see_are_told(tmp_path: Path) -> None:
    lines = [
        f"{40 + i % 50},{('north', 'mid')[i % 2]},{i % 50 + i % 7}" for i in range(80)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["size,town,price", *lines]))
    data = {"csv": str(tmp_path / "a.csv"), "target": "price", "missing": "impute"}
    tree = {**BASE, "data": data, "model": {"kind": "table_net", "hidden": [4]}}
    run = fit(validate(tree), tmp_path / "run", CPU, judge=False)
    told = "Categories that training did not see count as missing: in column 'town' (1 of 2 rows)."
    rows = [{"size": 60.0, "town": "mid"}, {"size": 45.0, "town": "east"}]
    with client(model=RunModel(run, draws=2, accelerator="cpu")) as server:
        assert "notes" not in server.post("/predict", json={"rows": rows[:1]}).json()
        answer = server.post("/predict", json={"rows": rows})
        assert answer.json()["notes"] == [told] == json.loads(answer.headers["x-notes"])
        missing = server.post(
            "/predict", json={"rows": [{**rows[1], "town": None}]}
        ).json()
        assert missing["predictions"]["mean"][0] == pytest.approx(
            answer.json()["predictions"]["mean"][1]
        )
    (tmp_path / "b.csv").write_text("size,town\n60,mid\n45,east\n")
    with pytest.warns(sb.SlimbayesWarning, match=re.escape(f"b.csv: {told}")):
        call("predict", run, tmp_path / "b.csv", "-o", tmp_path / "out.csv")


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec:FutureWarning", "ignore::UserWarning:torch.*"
)
@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_a_run_is_exported_and_predicts_as_it_does(
    kind: str, table_run: Path, tmp_path: Path
) -> None:
    """ONNX with noise of each row, and targets of which float32 has not the last digits."""
    file = tmp_path / f"net.{kind}"
    if kind == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
        table_run = run_on_a_table(tmp_path, 5e8, noise="heteroscedastic")
    done = call(
        "export",
        table_run,
        "--to",
        kind,
        "-o",
        file,
        "--draws",
        4,
        "--accelerator",
        "cpu",
    )
    assert (
        done.exit_code == 0 and "rows x 7 -> mean, aleatoric, epistemic" in done.output
    ), done.output
    want = predicted(table_run, tmp_path)
    if kind == "pt2":
        with pytest.raises(OwnCodeError, match="If you trust it, say --allow-code"):
            open_model(file, 1)
    with code_allowed(), client(model=open_model(file, 1)) as server:
        got = server.post("/predict", json={"rows": ROWS}).json()["predictions"]
        assert (
            server.post(
                "/predict", json={"rows": [{**ROWS[0], "town": "east"}]}
            ).status_code
            == 422
        )
        refused = server.post("/predict", json={"rows": ROWS, "level": 0.9})
        assert refused.status_code == 422 and "no intervals" in refused.text
    mean, aleatoric, epistemic = (
        np.array(got[n])[:, 0] for n in ("mean", "aleatoric", "epistemic")
    )
    if kind == "pt2":  # without slimbayes
        rows, _ = read_predictor(table_run, torch.device("cpu")).task.reader.rows(
            {n: [r[n] for r in ROWS] for n in ROWS[0]}
        )
        assert torch.export.load(file).module()(rows)[0][:, 0].tolist() == mean.tolist()
    np.testing.assert_allclose(mean, [row["mean"] for row in want], rtol=1e-9)
    np.testing.assert_allclose(
        aleatoric + epistemic, [row["std"] ** 2 for row in want], rtol=1e-3
    )
    np.testing.assert_allclose(
        epistemic, [row["epistemic_std"] ** 2 for row in want], rtol=1e-2
    )


def test_exports_that_cannot_be(table_run: Path, tmp_path: Path) -> None:
    done = call("export", table_run, "--to", "onnx", "-o", tmp_path / "net.pt2")
    assert done.exit_code == 2 and "must end in .onnx" in done.output
    assert call("export", table_run, "--to", "exe").exit_code == 2
    assert call("export", table_run, "--draws", 10**9).exit_code == 2
    assert (
        call("export", tmp_path / "nothing").exit_code
        == call("predict", tmp_path / "nothing", "a.csv", "-o", "b.csv").exit_code
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec:FutureWarning", "ignore::UserWarning:torch.*"
)
def test_an_exported_model_is_served(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    net = sb.bayesianize(nn.Linear(2, 3), sb.Rank1(members=2))
    sb.export(
        net, torch.randn(4, 2), tmp_path / "net.onnx", draws=2, likelihood="categorical"
    )
    with client(model=open_model(tmp_path / "net.onnx", 1)) as server:
        got = server.post("/predict", json={"rows": [[0.5, 1.0]]}).json()["predictions"]
        want = sb.predict(net, torch.tensor([[0.5, 1.0]]), draws=2, seed=0).probs
        np.testing.assert_allclose(got["mean"], want, atol=1e-4)
        assert (
            server.post("/predict", json={"rows": [[0.5, 1.0]], "draws": 2}).status_code
            == 422
        )
        assert server.post("/predict", json={"rows": [[0.5, 1e39]]}).status_code == 422
    written = onnx.load(tmp_path / "net.onnx")
    (about,) = [entry for entry in written.metadata_props if entry.key == "slimbayes"]
    about.value = json.dumps(
        json.loads(about.value) | {"outputs": ["draws"], "likelihood": None}
    )  # as without one
    onnx.save(written, tmp_path / "draws.onnx")
    with pytest.raises(RunError, match="export it with likelihood="):
        open_model(tmp_path / "draws.onnx", 1)


def test_the_command_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call("serve", str(tmp_path / "nothing"))
    assert done.exit_code == 3 and "neither a run's folder" in done.output
    done = call("serve", str(tmp_path), "--host", "0.0.0.0")
    assert done.exit_code == 1 and "a key is needed" in done.output
    monkeypatch.delitem(sys.modules, "slimbayes.lab.finished.serve")
    monkeypatch.delattr(sys.modules["slimbayes.lab.finished"], "serve")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = call("serve", str(tmp_path))
    assert done.exit_code == 3 and 'pip install "slimbayes[serve]"' in done.output


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for name in ("net.pt2", "net.onnx"):
        if name == "net.onnx":
            pytest.importorskip("onnxruntime")
        with pytest.raises(FileNotFoundError, match="neither a run's folder"):
            open_model(tmp_path / name, 1)
        (tmp_path / name).write_bytes(b"PK junk")
        with (
            code_allowed(),
            pytest.raises(RunError, match="cannot be opened|is no .pt2 file"),
        ):
            open_model(tmp_path / name, 1)
    with pytest.raises(FileNotFoundError, match="neither a run's folder"):
        open_model(tmp_path / "nothing", 1)


def test_intervals_hold_the_probability_they_promise() -> None:
    outputs, scale = torch.randn(7, 3, 2, dtype=torch.float64), 0.7
    found = sb.Prediction.from_outputs(outputs, "gaussian", likelihood_std=scale)
    columns = as_columns(found, (), 0.8)
    low, high = (
        torch.tensor(np.stack([columns[f"{end}_{t}"] for t in (0, 1)], 1))
        for end in ("low", "high")
    )
    inside = torch.special.ndtr((high - outputs) / scale) - torch.special.ndtr(
        (low - outputs) / scale
    )
    torch.testing.assert_close(
        inside.mean(0), torch.full((3, 2), 0.8, dtype=torch.float64)
    )


def test_the_page_says_what_was_measured() -> None:
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "benchmarks"))
    import serve_load

    found = json.loads((root / "results/benchmarks/serve.json").read_text())
    text = (root / "docs/serving.md").read_text()
    assert serve_load.page(found) in text and all(
        name in found for name in serve_load.GOALS
    )
    assert not serve_load.held("R11", found["R11"] | {"admitted": 1})[1]
    assert not serve_load.held("R9", found["R9"] | {"p99_ms": 501.0})[1]


def test_the_pace_follows_what_was_measured_of_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three tenths of the way with every batch; here 5 rows of 3 draws in 2 seconds, twice."""
    clock = iter([0.0, 2.0, 10.0, 12.0])
    monkeypatch.setattr(
        "slimbayes.lab.finished.serve.time",
        SimpleNamespace(perf_counter=lambda: next(clock)),
    )

    async def ask() -> list[float]:
        queue, paces = Queue(Doubles()), []
        for _ in range(2):
            answer = asyncio.get_running_loop().create_future()
            await queue._answer([Job(np.zeros((5, 2)), 3, None, answer)])
            paces.append(queue.pace)
        return paces

    first = 0.7 * 1e4 + 0.3 * 7.5
    assert asyncio.run(ask()) == pytest.approx([first, 0.7 * first + 0.3 * 7.5])
