"""An exported run predicts as `slimbayes predict` does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab_configs import BASE, CPU, call
from slimbayes_lab.configs.files import merged, validate
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.trained import read_predictor

pytestmark = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec:FutureWarning", "ignore::UserWarning:torch.*"
)


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


def predicted(run: Path, rows: Path) -> list[dict[str, Any]]:
    """What the command says about the rows of a file."""
    out = rows.with_name("out.json")
    assert call("predict", run, rows, "-o", out, "--draws", 4).exit_code == 0
    return json.loads(out.read_text())


@pytest.mark.slow
def test_an_exported_classifier_predicts_as_its_run_does(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run")
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    want = predicted(folder, tmp_path / "rows.npy")
    words = ("--draws", 4, "--accelerator", "cpu")
    done = call("export", folder, "--to", "pt2", "-o", tmp_path / "net.pt2", *words)
    assert done.exit_code == 0, done.output
    program = torch.export.load(tmp_path / "net.pt2").module()
    probs, _, epistemic = program(torch.tensor(rows))
    np.testing.assert_allclose(
        probs.detach()[:, 0], [row["p(0)"] for row in want], atol=1e-5
    )
    np.testing.assert_allclose(
        epistemic.detach(), [row["epistemic"] for row in want], atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pt2", "onnx"])
def test_an_exported_table_network_predicts_as_its_run_does(
    kind: str, tmp_path: Path
) -> None:
    """ONNX with noise of each row, and targets of which float32 has not the last digits."""
    if kind == "onnx":
        pytest.importorskip("onnxscript")
        onnxruntime = pytest.importorskip("onnxruntime")
        run = run_on_a_table(tmp_path, 5e8, noise="heteroscedastic")
    else:
        run = run_on_a_table(tmp_path, 5e6)
    file, rows = tmp_path / f"net.{kind}", tmp_path / "rows.csv"
    rows.write_text("town,size,sold\nmid,60,2024-05-01\nnorth,45,2024-02-01\n")
    words = ("--draws", 4, "--accelerator", "cpu")
    done = call("export", run, "--to", kind, "-o", file, *words)
    assert done.exit_code == 0, done.output
    assert "rows x 7 -> mean, aleatoric, epistemic" in done.output
    reader = read_predictor(run, torch.device("cpu")).task.reader
    assert reader is not None
    encoded = torch.cat(list(reader.blocks(rows)))
    if kind == "onnx":
        session = onnxruntime.InferenceSession(str(file))
        outputs = session.run(None, {"input": encoded.numpy()})
    else:
        outputs = torch.export.load(file).module()(encoded)
    mean, aleatoric, epistemic = (np.asarray(one.tolist())[:, 0] for one in outputs)
    want = predicted(run, rows)
    np.testing.assert_allclose(mean, [row["mean"] for row in want], rtol=1e-9)
    np.testing.assert_allclose(
        aleatoric + epistemic, [row["std"] ** 2 for row in want], rtol=1e-3
    )
    np.testing.assert_allclose(
        epistemic, [row["epistemic_std"] ** 2 for row in want], rtol=1e-2
    )


def test_exports_that_cannot_be_leave_no_file(tmp_path: Path) -> None:
    done = call("export", tmp_path, "--to", "onnx", "-o", tmp_path / "net.pt2")
    assert done.exit_code == 2 and "must end in .onnx" in done.output
    assert call("export", tmp_path, "--to", "exe").exit_code == 2
    assert call("export", tmp_path, "--draws", 10**9).exit_code == 2
    assert call("export", tmp_path / "nothing").exit_code == 1
    assert not list(tmp_path.iterdir())
