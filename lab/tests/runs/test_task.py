"""Rows, their scaling and their crops."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lab_configs import BASE, CPU, MINE, X, dense, experiment, mine
from slimbayes_lab.configs.experiment import Data
from slimbayes_lab.configs.files import merged, validate
from slimbayes_lab.data import Dataset, Split, load, prepare
from slimbayes_lab.data.folders import ImageFolder, read_crop, read_square
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.training import Training
from slimbayes_lab.runs.watchers import Watcher
from slimbayes_lab.tasks import task as task_module
from slimbayes_lab.tasks.task import Scaling, open_task
from test_health import write_text


def test_scaling_and_limits() -> None:
    task = open_task(experiment(data={"train_limit": None, "validation": 0.2}).data)
    assert (len(task.train), len(task.validation or ()), len(task.test)) == (
        800,
        200,
        100,
    )
    assert isinstance(task.train, Split)
    scaled = task.scaling(task.train.x)
    assert float(scaled.mean()) == pytest.approx(0, abs=1e-5) and float(
        scaled.std(correction=0)
    ) == pytest.approx(1, abs=1e-5)
    assert Scaling()(task.train.x).max() <= 1


def test_tables_of_ones_own_are_standardised() -> None:
    x = torch.randn(40, 3) * torch.tensor([1.0, 50.0, 0.0]) + torch.tensor(
        [0.0, 300.0, 7.0]
    )
    data = Dataset(
        "mine",
        {
            "train": Split(x, torch.arange(40) % 2),
            "test": Split(x[:5], torch.zeros(5, dtype=torch.int64)),
        },
    )
    task = open_task(
        experiment(data={"name": "mine", "train_limit": None, "test_limit": None}).data,
        None,
        data,
    )
    scaled = task.scaling(x)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        scaled.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0])
    )
    left = experiment(
        data={
            "name": "mine",
            "train_limit": None,
            "test_limit": None,
            "scaling": "unit",
        }
    ).data
    assert torch.equal(open_task(left, None, data).scaling(x), x)


def test_a_table_of_ones_own_brings_its_names() -> None:
    rows = Split(torch.randn(6, 2), torch.arange(6) % 2)
    assert open_task(
        Data(name="mine"),
        None,
        Dataset("mine", {"train": rows, "test": rows}, columns=("a", "b")),
    ).columns == ("a", "b")


def test_a_prepared_set_keeps_the_names(tmp_path: Path) -> None:
    (tmp_path / "yacht.csv").write_text("a, b,y\n1,2,3\n4,5,6\n")
    fresh = load("uci/yacht", tmp_path)
    prepare("uci/yacht", tmp_path)
    assert fresh.columns == load("uci/yacht", tmp_path).columns == ("a", "b")


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
    return Training(
        validate(tree), root, execution, execution.fabric("32"), Watcher(), None, None
    )


@pytest.mark.slow
def test_crops_of_a_wide_picture_show_its_sides(tmp_path: Path) -> None:
    write_wide_pictures(tmp_path)
    here = training(tmp_path)
    batches = [x for epoch in range(3) for x, _ in here._batches(epoch, 0)]
    x = torch.cat(batches)
    assert x.dtype == torch.uint8 and x.shape == (48, 3, 28, 28)
    left, right = (
        (x == 255).any(1).flatten(1).any(1),
        (x == 128).any(1).flatten(1).any(1),
    )
    assert 10 < int(left.sum()) < 48 and 10 < int(right.sum()) < 48
    assert not torch.equal(batches[0], batches[2]), "another epoch, other crops"
    rows, _ = here.stepper.rows((batches[0], torch.zeros(8, dtype=torch.long)))
    assert torch.equal(rows, here.task.scaling(batches[0])), "and none is cropped again"


@pytest.mark.slow
def test_a_crop_does_not_depend_on_who_decodes_it(tmp_path: Path) -> None:
    write_wide_pictures(tmp_path, count=4)
    alone, helped = (
        next(training(tmp_path, workers)._batches(0, 0))[0] for workers in (0, 2)
    )
    assert torch.equal(alone, helped)


def test_a_crop_of_all_is_the_picture_itself(tmp_path: Path) -> None:
    from PIL import Image

    file, pixels = (
        tmp_path / "a.png",
        np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8),
    )
    Image.fromarray(pixels).save(file)
    picture = torch.from_numpy(pixels).permute(2, 0, 1)
    same = read_crop(file, 40, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=False)
    mirrored = {
        tuple(read_crop(file, 40, (1.0, 1.0), (1.0, 1.0)).flatten().tolist())
        for _ in range(20)
    }
    assert torch.equal(same, picture) and mirrored == {
        tuple(p.flatten().tolist()) for p in (picture, picture.flip(2))
    }
    with pytest.raises(ValueError, match="scale"):
        read_crop(file, 8, scale=(0.0, 1.0))


def test_a_square_is_torchs_resize_and_the_middle_of_it(tmp_path: Path) -> None:
    """Against torch's own: the shorter side to 256 of 224 parts, then the middle."""
    from PIL import Image

    small = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(small).resize((144, 96), Image.Resampling.BICUBIC).save(
        file := tmp_path / "a.png"
    )
    whole = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)[None].float()
    scaled = torch.nn.functional.interpolate(
        whole, (64, 96), mode="bilinear", antialias=True
    )[0, :, 4:60, 20:76]
    difference = (read_square(file, 56, 7 / 8).float() - scaled).abs()
    assert difference.max() <= 1, "Pillow rounds after each direction"


def test_the_last_rows_can_be_held_out() -> None:
    whole = open_task(experiment(data={"train_limit": None}).data).train
    task = open_task(
        experiment(
            data={"train_limit": None, "validation": 0.2, "held_out": "last"}
        ).data
    )
    assert (
        isinstance(whole, Split)
        and isinstance(task.train, Split)
        and isinstance(task.validation, Split)
    )
    assert torch.equal(task.validation.x, whole.x[800:]) and torch.equal(
        task.train.y, whole.y[:800]
    )


def test_folders_have_limits_and_validation_rows(tmp_path: Path) -> None:
    write_wide_pictures(tmp_path)
    task = open_task(
        Data(name="imagenet", image_size=28, train_limit=12, validation=0.25), tmp_path
    )
    assert (len(task.train), len(task.validation or ()), len(task.test)) == (9, 3, 2)
    whole = load("imagenet", tmp_path).splits["train"]
    assert isinstance(task.train, ImageFolder) and isinstance(
        task.validation, ImageFolder
    )
    assert isinstance(whole, ImageFolder)
    used = [*task.train.paths, *task.validation.paths]
    assert len(set(used)) == 12 and set(used) <= set(whole.paths)
    labels = dict(zip(whole.paths, whole.y.tolist()))
    assert task.train.y.tolist() == [labels[path] for path in task.train.paths]
    assert task.validation[0][0].shape == (3, 28, 28)


def test_a_split_of_the_set_can_be_the_validation_rows() -> None:
    rows = {
        name: Split(X[i : i + 10], torch.arange(10) % 2)
        for i, name in enumerate(("train", "test", "b"))
    }
    data = Dataset("mine", rows, ("n", "y"))
    task = open_task(Data(name="mine", validation="b"), None, data)
    assert (
        isinstance(task.validation, Split)
        and torch.equal(task.validation.x, X[2:12])
        and len(task.train) == 10
    )
    with_b, without = (
        open_task(Data(name="mine", validation=v), None, data).sha256
        for v in ("b", 0.0)
    )
    assert with_b != without, "a run knows which rows chose its weights"
    with pytest.raises(ValueError, match="no split 'c'"):
        open_task(Data(name="mine", validation="c"), None, data)


def test_bags_are_a_choice_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "physionet2012").mkdir()
    outcomes = write_text(tmp_path / "physionet2012") / "Outcomes-a.txt"
    outcomes.write_text(
        outcomes.read_text().replace("-1,1\n", "-1,0\n", 1)
    )  # else all who are trained on died
    hourly, daily = (
        open_task(
            Data.model_validate(
                {"name": "physionet2012", "validation": "validation"} | more
            ),
            tmp_path,
        )
        for more in (
            {},
            {
                "bags": {
                    "precision": 24.0,
                    "aggregate_older_than": 36.0,
                    "tokens_per_bag": 3,
                }
            },
        )
    )
    assert isinstance(hourly.train, Split) and isinstance(daily.train, Split)
    assert hourly.train.x.shape[1] == 48 and daily.train.x.shape[1:] == (3, 3)
    assert isinstance(daily.validation, Split) and daily.validation.x.shape[1:] == (
        3,
        3,
    )
    again = Data.model_validate({"name": "physionet2012", "bags": {"precision": 24.0}})
    before = open_task(again, tmp_path).test.y.tolist()
    outcomes = tmp_path / "physionet2012" / "Outcomes-c.txt"
    outcomes.write_text(outcomes.read_text().replace("-1,1\n", "-1,0\n"))
    os.utime(outcomes, (1, 1))
    assert before == [1] and open_task(again, tmp_path).test.y.tolist() == [0], (
        "files that changed are read anew"
    )
    with pytest.raises(ValueError, match="digits"):
        open_task(Data.model_validate({"name": "digits", "bags": {}}), tmp_path)


# --- the door for data ---


def faulty(fault: str) -> Dataset:
    """Data for three classes with one fault in them."""
    x, y = X.clone(), torch.arange(60) % 3
    nan, classes = float("nan"), ("a", "b", "c")
    if fault.startswith("nan"):
        x[{"nan train": 17, "nan test": 45}[fault], 2] = nan
    if fault == "infinite":
        x[3, 0] = float("inf")
    if fault.startswith("label"):
        y[50 if "test" in fault else 5] = int(fault.split()[1])
    if fault == "one class":
        y = torch.full_like(y, 2)
    data = mine(x, y, *() if "bare" in fault else classes)
    if fault == "no rows":
        return Dataset(
            "mine", dict(data.splits) | {"test": Split(x[:0], y[:0])}, classes
        )
    if fault == "width":
        return Dataset(
            "mine", dict(data.splits) | {"test": Split(x[40:, :3], y[40:])}, classes
        )
    if fault == "no columns":
        return mine(x[:, :0], y, *classes)
    if fault == "list":
        return Dataset(
            "mine", {"train": Split(x.tolist(), y), "test": data.test}, classes
        )  # type: ignore[arg-type]
    if fault == "complex":
        return mine(x.to(torch.complex64), y, *classes)
    if fault == "target":
        return mine(
            x, torch.linspace(0, 1, 60).where(torch.arange(60) != 44, nan)[:, None]
        )
    return data


@pytest.mark.parametrize(("fault", "told"), [
    ("nan train", r"mine, train row 17, column 2: the input is nan.*Fill it in"),
    ("nan test", "mine, test row 5, column 2: the input is nan"),
    ("infinite", "mine, train row 3, column 0: the input is inf"),
    ("label 3", r"mine, train row 5: the label 3 is not one of 0\.\.2"),
    ("label -100 test", r"mine, test row 10: the label -100 is not one of 0\.\.2"),
    ("label -1 bare", "mine, train row 5: the label -1 is not 0 or more"),
    ("one class", "mine, train: all 40 labels are 2"),
    ("no rows", "mine: the test split has no rows"),
    ("width", r"train rows of shape \(4,\) and test rows of shape \(3,\)"),
    ("no columns", "rows have no columns"),
    ("list", "inputs must be a tensor of real numbers, got list"),
    ("complex", "got torch.complex64"),
    ("target", "mine, test row 4, column 0: the target is nan"),
])  # fmt: skip
@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["standard", "unit"])
def test_rows_that_cannot_be_used_are_refused_before_training(
    fault: str, told: str, scaling: str, tmp_path: Path
) -> None:
    """By split, row and column: scaling must not spread a NaN over all rows before anyone looks."""
    chosen = experiment(**MINE)
    chosen = chosen.model_copy(
        update={"data": chosen.data.model_copy(update={"scaling": scaling})}
    )
    with pytest.raises((ValueError, TypeError), match=told):
        fit(chosen, tmp_path / "run", CPU, network=dense(3), dataset=faulty(fault))
    assert (
        not (tmp_path / "run" / "checkpoints").exists()
        and not (tmp_path / "run" / "steps.csv").exists()
    )


def test_a_table_too_small_to_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "yacht.csv").write_text("a,y\n1,2\n3,4\n")
    with pytest.raises(ValueError, match="no rows are left in the test split"):
        open_task(Data(name="uci/yacht"), tmp_path)


def test_moments_of_many_numbers_are_those_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = task_module._moments(X)
    monkeypatch.setattr(task_module, "_MANY", 10)
    for ours, theirs in zip(task_module._moments(X), whole, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("own", [False, True])
def test_a_target_that_training_rows_do_not_vary_in_is_refused(
    own: bool, tmp_path: Path
) -> None:
    rows = [f"{i}.5,{2 if i < 36 else 3}.25" for i in range(40)]
    (tmp_path / "yacht.csv").write_text(
        "\n".join(["a,y", *(rows if own else [row[:-4] + "2.25" for row in rows])])
    )
    data = Data(
        name="t",
        csv=str(tmp_path / "yacht.csv"),
        target="y",
        task="regression",
        held_out="last",
        test=0.1,
    )
    with pytest.raises(ValueError, match=r"the target is 2\.25 in all training rows"):
        open_task(data if own else Data(name="uci/yacht"), tmp_path)
