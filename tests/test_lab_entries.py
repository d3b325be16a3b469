"""csv columns are known by name, diagnostics compare in one unit, and random crops come from the full picture."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lab_configs import BASE, CPU
from test_lab_review import call
from torch import nn

import slimbayes as sb
from slimbayes.data import Dataset, Split, load, prepare
from slimbayes.data.augment import picture_crop
from slimbayes.lab import diagnose as diagnosing
from slimbayes.lab.config import Data
from slimbayes.lab.config_files import merged, validate
from slimbayes.lab.diagnose import Case, diagnose
from slimbayes.lab.evaluate import Predictor
from slimbayes.lab.execution import Nobody
from slimbayes.lab.fit import Training
from slimbayes.lab.predict_file import read_rows
from slimbayes.lab.task import Scaling, Task, open_task

NAMES = ("length", "beam", "draught")


# --- a csv of one's own ---


def regression(**changes: Any) -> dict[str, Any]:
    tree = merged(BASE, {
        "data": {"name": "uci/yacht", "train_limit": None, "test_limit": None},
        "model": {"kind": "regression_net", "hidden": 8}, "method": {"kind": "BatchEnsemble", "members": 2},
        "train": {"epochs": 2, "batch": 24, "noise": 0.1}, "evaluate": {"draws": [1]},
    })  # fmt: skip
    return merged(tree, changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with column names."""
    root = tmp_path_factory.mktemp("table")
    x = np.random.default_rng(0).normal(size=(80, 3))
    (root / "uci").mkdir()
    with open(root / "uci" / "yacht.csv", "w", newline="") as handle:
        csv.writer(handle).writerows([[*NAMES, "drag"], *np.column_stack([x, 100 + 30 * x[:, 0]]).tolist()])
    (root / "r.yaml").write_text(yaml.safe_dump(regression()))
    done = call("fit", root / "r.yaml", "--out", root / "run", "--data-dir", root, "--accelerator", "cpu")
    assert done.exit_code == 0, done.output
    return root / "run"


def predicted(run: Path, folder: Path, text: str) -> Any:
    """Means for the rows of a csv, or the words of a refusal."""
    (folder / "x.csv").write_text(text)
    done = call("predict", run, folder / "x.csv", "-o", folder / "p.csv", "--accelerator", "cpu")
    if done.exit_code:
        return " ".join(done.output.split())
    return [float(row["mean"]) for row in csv.DictReader((folder / "p.csv").read_text().splitlines())]


def test_columns_are_known_by_name(run: Path, tmp_path: Path) -> None:
    right = predicted(run, tmp_path, "length,beam,draught\n1,2,3\n-1,0,2\n")
    assert len(right) == 2
    assert predicted(run, tmp_path, "draught,length,beam\n3,1,2\n2,-1,0\n") == right
    assert predicted(run, tmp_path, "\ufeffbeam, draught,length\n2,3,1\n0,2,-1\n") == right, (
        "a byte-order mark and blanks are no names"
    )


def test_without_names_the_first_row_is_a_row(run: Path, tmp_path: Path) -> None:
    named = predicted(run, tmp_path, "length,beam,draught\n1,2,3\n-1,0,2\n")
    assert predicted(run, tmp_path, "1,2,3\n-1,0,2\n") == named


@pytest.mark.parametrize(("text", "told"), [
    ("length,beam\n1,2\n", "missing: 'draught'"),
    ("length,beam,draft\n1,2,3\n", "missing: 'draught'; not known to the run: 'draft'"),
    ("length,beam,draught,drag\n1,2,3,4\n", "not known to the run: 'drag'"),
    ("length,beam,draught,beam\n1,2,3,4\n", "there twice: 'beam'"),
    ("length,beam,3\n1,2,3\n", "not known to the run: '3'"),
    ("1,,3\n1,2,3\n", "line 1"),
    ("1,2,3\n1,2\n", "line 2: 2 cells, but there are 3 in the first row"),
    ("length,beam,draught\n", "no rows below"),
])  # fmt: skip
def test_columns_that_do_not_fit_are_refused_in_words(text: str, told: str, run: Path, tmp_path: Path) -> None:
    assert told in predicted(run, tmp_path, text)


def test_names_that_are_numbers_are_names_if_the_run_knows_them(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,0\n5,6\n")
    assert read_rows(tmp_path / "x.csv", ("0", "1")).tolist() == [[6.0, 5.0]]
    assert read_rows(tmp_path / "x.csv").tolist() == [[1.0, 0.0], [5.0, 6.0]]


def test_a_line_that_is_neither_row_nor_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("1,,3\n5,6,7\n")
    with pytest.raises(ValueError, match="neither a row nor"):
        read_rows(tmp_path / "x.csv")


def test_a_cache_keeps_the_names(tmp_path: Path) -> None:
    (tmp_path / "yacht.csv").write_text("a, b,y\n1,2,3\n4,5,6\n")
    fresh = load("uci/yacht", tmp_path)
    prepare("uci/yacht", tmp_path)
    assert fresh.columns == load("uci/yacht", tmp_path).columns == ("a", "b")


# --- diagnostics in one unit ---


class Exact(nn.Module):
    """Predicts the standardised target of a row exactly: it is the row's only number."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(1, 1)
        nn.init.ones_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)


@pytest.mark.parametrize("rows", ["test", "validation"])
def test_a_perfect_regression_has_the_likelihood_of_its_noise(
    rows: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mean, std, noise = torch.tensor([500.0]), torch.tensor([20.0]), 0.1
    z = torch.randn(30, 1)
    standard, own = Split(z, z), Split(z, z * std + mean)
    task = Task("mine", standard, own, standard, Scaling(), y_mean=mean, y_std=std)
    network = sb.bayesianize(Exact(), sb.BatchEnsemble(members=2, mean_init=sb.Point(1.0)))
    loaded = Predictor(validate(regression(train={"noise": noise})), network, task, "gaussian")
    monkeypatch.setattr(diagnosing, "load_run", lambda *_: loaded)
    numbers, _ = diagnose("elbo", Case(tmp_path, tmp_path, draws=2, options={"rows": rows}))
    log_density = -float(torch.distributions.Normal(mean, noise * std).log_prob(mean))  # in the targets' own units
    assert numbers["draw_nll"] == pytest.approx(log_density, abs=1e-4)
    assert numbers["rmse"] < 1e-3 and -numbers["lpd"] == pytest.approx(log_density, abs=1e-4)
    assert numbers["neg_elbo"] == pytest.approx(numbers["draw_nll"] + numbers["kl"])


# --- random crops ---


def write_wide_pictures(root: Path, count: int = 8) -> None:
    """Pictures of 300 x 900 pixels: black, with a white left and a grey right third."""
    from PIL import Image

    pixels = np.zeros((300, 900, 3), np.uint8)
    pixels[:, :300], pixels[:, 600:] = 255, 128
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = root / "imagenet" / split / name
            folder.mkdir(parents=True)
            for i in range(count if split == "train" else 1):
                Image.fromarray(pixels).save(folder / f"{i}.png")


def training(root: Path, workers: int = 0) -> Training:
    tree = merged(BASE, {
        "data": {"name": "imagenet", "image_size": 28, "train_limit": None, "test_limit": None},
        "model": {"kind": "small_cnn", "width": 4}, "augment": {"kind": "resized_crop", "size": 28, "flip": False},
        "train": {"epochs": 1, "batch": 8}, "evaluate": {"batch": 2},
    })  # fmt: skip
    execution = replace(CPU, workers=workers, data_dir=root)
    return Training(validate(tree), root, execution, execution.fabric("32"), Nobody(), None, None)


def test_crops_of_a_wide_picture_show_its_sides(tmp_path: Path) -> None:
    write_wide_pictures(tmp_path)
    here = training(tmp_path)
    batches = [x for epoch in range(3) for x, _ in here._batches(epoch, 0)]
    x = torch.cat(batches)
    assert x.dtype == torch.uint8 and x.shape == (48, 3, 28, 28)
    left, right = (x == 255).any(1).flatten(1).any(1), (x == 128).any(1).flatten(1).any(1)
    assert 10 < int(left.sum()) < 48 and 10 < int(right.sum()) < 48
    assert not torch.equal(batches[0], batches[2]), "another epoch, other crops"
    rows, _ = here.stepper.rows((batches[0], torch.zeros(8, dtype=torch.long)))
    assert torch.equal(rows, here.task.scaling(batches[0])), "and none is cropped again"


def test_a_crop_does_not_depend_on_who_decodes_it(tmp_path: Path) -> None:
    write_wide_pictures(tmp_path, count=4)
    alone, helped = (next(training(tmp_path, workers)._batches(0, 0))[0] for workers in (0, 2))
    assert torch.equal(alone, helped)


def test_a_crop_of_all_is_the_picture_shrunk(tmp_path: Path) -> None:
    picture = torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8)
    same = picture_crop(picture, 40, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=False)
    mirrored = {tuple(picture_crop(picture, 40, (1.0, 1.0), (1.0, 1.0)).flatten().tolist()) for _ in range(20)}
    assert torch.equal(same, picture) and mirrored == {tuple(p.flatten().tolist()) for p in (picture, picture.flip(2))}
    with pytest.raises(ValueError, match="scale"):
        picture_crop(picture, 8, scale=(0.0, 1.0))


def test_a_table_of_ones_own_brings_its_names() -> None:
    rows = Split(torch.randn(6, 2), torch.arange(6) % 2)
    assert open_task(
        Data(name="mine"), None, Dataset("mine", {"train": rows, "test": rows}, columns=("a", "b"))
    ).columns == ("a", "b")
