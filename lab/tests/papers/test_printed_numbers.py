"""What the tables' files say was printed stands in the papers, in that order; needs the papers' texts."""

import math
import os
import re
from pathlib import Path

import pytest
from paper_rows import FOLDER, ROOT, ROWS
from slimbayes_lab.data import CORRUPTIONS
from slimbayes_lab.papers.rows import PaperRow, find

import slimbayes as sb

PAPERS = {
    "rank1": "rank1-bnn.txt",
    "k_tied": "k-tied-normal.txt",
    "emp": "ensemble-model-patching.txt",
}


def _text(paper: str) -> str:
    folder = Path(os.environ.get("SLIMBAYES_PAPERS", ROOT.parent / "shared" / "papers"))
    file = folder / PAPERS[paper]
    if not file.is_file():
        pytest.skip(f"the paper's text is not at {file}")
    return re.sub(
        r"\s+",
        " ",
        file.read_text(encoding="utf8").replace(r"\pm", "±").replace("$", ""),
    )


def _pattern(numbers: list[float]) -> str:
    """These numbers one after another, whatever zeros, signs and words of fewer than 30 letters stand between."""
    return r"[^\d]{1,30}".join(
        rf"{re.escape(f'{abs(value):g}' if value < 1e4 else f'{value:,.0f}')}0*(?:\.0*)?%?(?!\d)"
        for value in numbers
    )


SPOTS = [
    f"rank1/{t}/{r}"
    for t in ("table1", "table2", "table3")
    for r in ("deterministic", "batch-ensemble", "rank1-gaussian", "rank1-cauchy")
]
SPOTS += [
    f"emp/table4/{r}"
    for r in ("emp", "emp-norm", "ecmp", "ecmp-norm", "dropout", "vanilla")
] + [f"emp/table5/{r}" for r in ("emp", "ecmp", "dropout")]
SPOTS += [f"emp/table{t}/imagenet-{s}" for t in (9, 10, 11) for s in (1, 20, 100, 200)]
SPOTS += [f"rank1/table8/rank1-gaussian-{s}" for s in (1, 4, 25)]


@pytest.mark.parametrize("name", SPOTS)
def test_numbers_stand_in_the_paper_in_this_order(name: str) -> None:
    (row,) = find(name, [FOLDER])
    numbers = [v for k, v in row.paper.numbers.items() if k != "parameters"]
    assert re.search(_pattern(numbers), _text(name.split("/")[0])), (
        f"{numbers} is not a line of the paper"
    )


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.name.startswith("k_tied") and row.paper.errors],
    ids=lambda row: row.name,
)
def test_numbers_and_errors_of_the_k_tied_paper(row: PaperRow) -> None:
    numbers, errors = row.paper.numbers, row.paper.errors
    text = _text("k_tied")
    for name, error in errors.items():
        found = rf"{re.escape(f'{numbers[name]:g}')}(?:\.0)?0* ± {re.escape(f'{error:g}')}0*(?!\d)"
        assert re.search(found, text), (
            f"{name} {numbers[name]} ± {error} is not in the paper"
        )


@pytest.mark.parametrize("table", ["emp/table12", "emp/table13"])
def test_regressions_stand_in_the_paper_set_by_set(table: str) -> None:
    """The four methods' numbers of a set, in the order of the paper's columns, once errors are left out."""
    rows = find(table, [FOLDER])
    text = re.sub(r"± ?(N/A|[\d.]+)", "", re.sub(r"</?b>|\\\\", "", _text("emp")))
    for start in range(0, len(rows), 4):
        values = [
            next(iter(row.paper.numbers.values())) for row in rows[start : start + 4]
        ]
        found = r"[\s-]+".join(re.escape(f"{abs(value):.2f}") for value in values)
        assert re.search(found, text), (
            f"{rows[start].name}: {values} is not a line of the paper"
        )


def test_corruptions_of_table_5_are_all_fifteen() -> None:
    (row,) = find("emp/table5/emp", [FOLDER])
    assert [n.removeprefix("error_") for n in row.paper.numbers][1:] == list(
        CORRUPTIONS
    )


def _settings(dataset: str) -> dict[str, tuple[str, str]]:
    """A table of hyperparameters in the rank-1 paper, by name: (Normal, Cauchy), of which one may stand for both."""
    _text("rank1")  # skips without the paper
    folder = Path(os.environ.get("SLIMBAYES_PAPERS", ROOT.parent / "shared" / "papers"))
    text = (folder / PAPERS["rank1"]).read_text(encoding="utf8")
    lines = (
        text[text.index(f"Dataset\t{dataset}") :].partition("\nTable ")[0].splitlines()
    )
    found = {}
    for name, first, *rest in (
        line.replace("$", "").split("\t") for line in lines if line.count("\t") >= 2
    ):
        found[name] = (first, next(iter(rest), "") or first)
    return found


def _number(text: str) -> float:
    text = text.replace("\N{MINUS SIGN}", "-").replace("10^{-6}", "1e-6").rstrip(".")
    return float(math.prod(map(float, text.split("*"))))


@pytest.mark.parametrize(
    ("column", "row"), [(0, "rank1-gaussian"), (1, "rank1-cauchy")]
)
def test_imagenet_has_the_settings_of_table_6(column: int, row: str) -> None:
    said = {n: both[column] for n, both in _settings("ImageNet").items()}
    chosen = find(f"rank1/table1/{row}", [FOLDER])[0].experiment()
    method, train = chosen.method.build(), chosen.train
    assert method.members == _number(said["ensemble_size"])
    assert train.batch * method.members == _number(
        said["per_core_batch_size"]
    ) * _number(said["num_cores"])
    assert train.optimizer.lr == pytest.approx(
        _number(said["base_learning_rate"]) * train.batch / 256
    )
    assert train.schedule.factor == _number(
        said["lr_decay_ratio"]
    ) and train.epochs == _number(said["train_epochs"])
    ends = [float(n) for n in said["lr_decay_epochs"].strip("[]").split(",")]
    assert [
        share * train.epochs for share in train.schedule.milestones
    ] == pytest.approx(ends, rel=1e-5)
    assert train.kl.share * train.epochs == pytest.approx(
        _number(said["kl_annealing_epochs"]), rel=1e-5
    )
    assert train.weight_decay.kernels == pytest.approx(2 * _number(said["l2"]))
    assert (
        type(method.prior).__name__
        == {"trainable_normal": "Normal", "trainable_cauchy": "Cauchy"}[
            said["alpha_initializer"]
        ]
    )
    assert (method.prior.loc, method.prior.scale) == (
        _number(said["prior_mean"]),
        _number(said["prior_stddev"]),
    )
    assert method.scale_init == pytest.approx(
        sb.dropout_scale(_number(said["dropout_rate (init)"])), rel=1e-5
    )
    assert method.mean_init == sb.Normal(1.0, -_number(said["random_sign_init"]))


@pytest.mark.parametrize(
    ("column", "row"), [(0, "rank1-gaussian"), (1, "rank1-cauchy")]
)
def test_health_records_have_the_settings_of_table_7(column: int, row: str) -> None:
    said = {n: both[column] for n, both in _settings("MIMIC-III").items()}
    chosen = find(f"rank1/table4/{row}", [FOLDER])[0].experiment()
    method, train = chosen.method.build()["lstm|hidden|output"], chosen.train
    assert method.members == _number(
        said["ensemble_size"]
    ) and chosen.evaluate.bins == _number(said["num_ece_bins"])
    assert chosen.model.units == _number(
        said["rnn_dim"]
    ) and chosen.model.hidden == _number(said["hidden_layer_dim"])
    width = _number(said["dense_embedding_dimension"]) * _number(
        said["embedding_dimension_multiplier"]
    )
    assert chosen.model.embedding == int(width) or chosen.model.embedding == round(
        width
    )
    assert chosen.data.bags.precision * 3600 == _number(said["bagging_time_precision"])
    older = chosen.data.bags.aggregate_older_than
    assert (-1 if older is None else older * 3600) == _number(
        said["bagging_aggregate_older_than"]
    )
    stays, batch = (
        4000,
        _number(said["batch_size"]) / method.members,
    )  # of PhysioNet's set a
    assert train.batch == batch and train.epochs * (stays // train.batch) == _number(
        said["max_steps"]
    )
    assert train.optimizer.lr == _number(
        said["learning_rate"]
    ) and train.clip == _number(said["clip_norm"])
    assert train.weight_decay == pytest.approx(2 * _number(said["l2"]) / stays)
    assert train.posterior_lr == _number(said["fast_weight_lr_multiplier"])
    steps = _number(said["kl_annealing_steps"])
    assert train.kl_weight(1000, stays // train.batch) == pytest.approx(
        1000 / steps, rel=2e-3
    )
    assert (method.prior.loc, method.prior.scale) == (
        _number(said["prior_mean"]),
        _number(said["prior_stddev"]),
    )
    assert method.scale_init == pytest.approx(
        sb.dropout_scale(_number(said["dropout_rate (init)"])), rel=1e-5
    )
    assert method.mean_init == sb.Signs(_number(said["random_sign_init"]))
    embedding = chosen.method.build()["embedding"]
    assert isinstance(embedding, sb.MeanField) and isinstance(
        embedding.prior, sb.Normal
    )
