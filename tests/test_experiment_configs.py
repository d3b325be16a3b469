"""The papers' rows as configs: each is valid at both scales, builds its network, has the printed size, and copies the paper's numbers."""

import math
import os
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.data import CORRUPTIONS
from slimbayes.data.catalog import SOURCES
from slimbayes.data.tables import UCI
from slimbayes.lab.config import Experiment
from slimbayes.lab.diagnose import DIAGNOSTICS
from slimbayes.lab.markdown import overview
from slimbayes.lab.network import build_network
from slimbayes.lab.rows import Row, find, listings
from slimbayes.models import keras_count

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments"
ROWS = [row for listed in listings([FOLDER]) for row in find(listed.name, [FOLDER])]
TRAINED = [row for row in ROWS if row.trains]
PAPERS = {"rank1": "rank1-bnn.txt", "k_tied": "k-tied-normal.txt", "emp": "ensemble-model-patching.txt"}
_IMAGES = {"cifar10": (10, 3, 32), "cifar100": (100, 3, 32), "mnist": (10, 1, 28)}
_TRAIN = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "mnist": 60_000,
    "imdb": 25_000,
    "physionet2012": 4000,
    "imagenet": 1_281_167,
}


def facts(name: str) -> dict[str, int]:
    """What the data would say about a network."""
    if name in _IMAGES:
        classes, channels, size = _IMAGES[name]
        return {"classes": classes, "channels": channels, "size": size, "inputs": channels * size**2, "vocabulary": 0}
    if name.startswith("uci/"):
        return {"inputs": UCI[name.removeprefix("uci/")][1], "outputs": 1, "vocabulary": 0}
    known = {"imagenet": {"classes": 1000, "channels": 3}, "imdb": {"classes": 2, "inputs": 80, "vocabulary": 20_000}}
    return known.get(name) or {"classes": 2, "inputs": 4944, "vocabulary": 277}


def train_rows(experiment: Experiment) -> int:
    data = experiment.data
    rows = _TRAIN.get(data.name) or round(0.9 * UCI[data.name.removeprefix("uci/")][0])
    rows = min(rows, data.train_limit or rows)
    return rows - round(rows * data.validation)


@cache
def _built(text: str) -> nn.Module:
    experiment = Experiment.model_validate_json(text)
    task: Any = SimpleNamespace(name=experiment.data.name, fills=lambda: facts(experiment.data.name))
    with torch.device("meta"):  # shapes without numbers
        return build_network(experiment, task)


def built(experiment: Experiment) -> nn.Module:
    """The converted network on the meta device; rows that share one share the work."""
    small = {
        "train": {"epochs": 1, "optimizer": {"kind": "SGD"}},
        "name": "one",
        "data": {"name": experiment.data.name},
    }
    whole = experiment.resolved
    return _built(
        Experiment.model_validate(
            small | {k: whole[k] for k in ("model", "method", "include", "exclude")}
        ).model_dump_json()
    )


def ids(row: Row) -> str:
    return row.name


def test_every_table_and_figure_is_there() -> None:
    wanted = {
        "rank1": [
            "table1",
            "table2",
            "table3",
            "table4",
            "table8",
            "figure2",
            "figure3",
            "figure4",
            "figure5",
            "figure6",
            "figure9",
        ],
        "k_tied": [
            "table2",
            "table3",
            "table5",
            "figure3",
            "figure4",
            "figure5",
            "figure6",
            "figure7",
            "figure9",
            "figure10",
        ],
        "emp": [
            "table4",
            "table5",
            "table6",
            *(f"table{n}" for n in range(9, 14)),
            "figure3",
            "figure4",
            "figure5",
            "figure6",
        ],
    }
    found = {listed.name for listed in listings([FOLDER])}
    assert {f"{paper}/{place}" for paper, places in wanted.items() for place in places} <= found


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_a_row_is_valid_at_both_scales(row: Row) -> None:
    paper = row.paper
    assert (paper.table is None) != (paper.figure is None)
    assert paper.numbers or paper.shows or not row.trains, "nothing to show"
    assert set(paper.diagnostic) <= set(DIAGNOSTICS)
    assert set(paper.errors) <= set(paper.numbers)
    assert paper.relative_to is None or (row.file.parent / f"{paper.relative_to}.yaml").is_file()
    if row.trains:
        full, small = row.experiment("full"), row.experiment("small")
        assert full.data.name in SOURCES and small.data.name in SOURCES
        assert paper.draws is None or paper.draws in full.evaluate.draws or not _draws(full)
        assert small.data.name != "imagenet"
        steps = small.train.epochs * max(1, train_rows(small) // small.train.batch)
        assert steps <= 2000, "small runs are for a minute or so"
        assert small.train.epochs <= full.train.epochs


def _draws(experiment: Experiment) -> bool:
    """Whether a network is random at all."""
    return experiment.method.kind not in ("Deterministic", "Ensemble") and experiment.data.name != "imagenet"


@pytest.mark.parametrize("scale", ["full", "small"])
@pytest.mark.parametrize("row", TRAINED, ids=ids)
def test_its_network_builds_and_converts(row: Row, scale: Any) -> None:
    experiment = row.experiment(scale)
    table = sb.summary(built(experiment))
    assert table.after >= table.before
    if experiment.method.kind not in ("Deterministic", "Ensemble"):
        assert any(line.status == "converted" for line in table.rows)


# Sizes ------------------------------------------------------------------------------------------------------------------

# Trainable parameters by our own count of the papers' networks; what is printed is rounded, or wrong where the second number says so.
EXACT = {
    "rank1/table1/deterministic": 25_557_032, "rank1/table1/batch-ensemble": 25_768_588, "rank1/table1/rank1-gaussian": 25_977_144,
    "rank1/table1/rank1-cauchy": 25_977_144, "rank1/table2/deterministic": 36_479_194, "rank1/table2/batch-ensemble": 36_557_548,
    "rank1/table2/rank1-gaussian": 36_635_872, "rank1/table2/rank1-cauchy": 36_635_872, "rank1/table3/deterministic": 36_536_884,
    "rank1/table3/batch-ensemble": 36_615_868, "rank1/table3/rank1-gaussian": 36_694_552, "rank1/table2/deep-ensemble-5": 4 * 9_132_634,
    "rank1/table3/deep-ensemble-5": 4 * 9_161_524, "emp/table4/emp": 13_779_912, "emp/table4/ecmp": 13_779_912, "emp/table4/emp-norm": 11_727_912,
    "emp/table4/vanilla": 11_689_512, "emp/table4/dropout": 11_689_512, "emp/table6/emp": 28_825_299, "emp/table6/ecmp": 28_825_299,
    "emp/table6/vanilla": 28_511_307,
}  # fmt: skip
MISPRINTED = {
    "rank1/table1/deep-ensemble", "rank1/table2/deep-ensemble-5", "rank1/table3/deep-ensemble-5", "rank1/table3/rank1-gaussian",
    "rank1/table3/rank1-cauchy", "k_tied/figure6/cifar100-2-tied",
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_sizes_are_the_papers(name: str) -> None:
    (row,) = find(name, [FOLDER])
    assert sb.summary(built(row.experiment())).after == EXACT[name]


@pytest.mark.parametrize(
    "row", [row for row in TRAINED if {"parameters", "overhead"} & row.paper.numbers.keys()], ids=ids
)
def test_printed_sizes_are_ours_rounded(row: Row) -> None:
    """Rounded to the digits printed, but for the misprints."""
    network = built(row.experiment())
    table, numbers = sb.summary(network), row.paper.numbers
    if "overhead" in numbers:
        assert 100 * (table.after / table.before - 1) == pytest.approx(numbers["overhead"], rel=0.01, abs=1e-9)
        return
    if "elbo" in row.paper.diagnostic or "truncation" in row.paper.diagnostic:
        count = (
            keras_count(network) - row.paper.options.get("uncounted", 0) + _tied(network, row.paper.options.get("rank"))
        )
    else:
        count = table.after
    unit = {"k": 1e3, "M": 1e6}.get(row.paper.units.get("parameters", ""), 1.0)
    digits = len(f"{numbers['parameters']:g}".partition(".")[2])
    near = abs(count / unit - numbers["parameters"]) <= 0.5 * 10**-digits
    assert near != (row.name in MISPRINTED)


def _tied(network: nn.Module, rank: int | None) -> int:
    """What k-tied factors save against free scales."""
    from slimbayes.layers.base import BayesLayer

    sizes = [
        p.site.matrix for layer in network.modules() if isinstance(layer, BayesLayer) for p in layer.posterior.values()
    ]
    return 0 if rank is None else sum(rank * (m + n) - m * n for m, n in sizes)


def test_rows_that_share_a_config_share_a_run() -> None:
    """The two tables of regressions come from the same runs, as do post-hoc truncations and numbers of draws."""
    from slimbayes.lab.reproduce import experiments_of

    names = {"emp/table12": 40, "k_tied/table2": 3, "k_tied/table5": 1, "rank1/table8": 3, "emp/table9": 4}
    assert {name: len(experiments_of(find(name, [FOLDER]))) for name in names} == names
    assert experiments_of(find("emp/table12", [FOLDER])).keys() == experiments_of(find("emp/table13", [FOLDER])).keys()
    assert (
        experiments_of(find("rank1/table8", [FOLDER])).keys() <= experiments_of(find("rank1/table2", [FOLDER])).keys()
    )


# Settings that are easy to get wrong --------------------------------------------------------------------------------------


def test_rank1_settings_are_table_5s() -> None:
    for name, prior, mean, decay in (
        ("table2/rank1-gaussian", 0.1, 0.5, 2e-4),
        ("table3/rank1-cauchy", 0.01, 1.0, 6e-4),
    ):
        (row,) = find(f"rank1/{name}", [FOLDER])
        experiment = row.experiment()
        method = experiment.method.build()
        assert (method.prior.loc, method.prior.scale, method.mean_init.loc, method.mean_init.scale) == (
            1.0,
            prior,
            1.0,
            mean,
        )
        assert experiment.train.weight_decay == decay
        rate = 1e-3 if "gaussian" in name else 1e-6
        assert method.scale_init == pytest.approx(math.sqrt(rate / (1 - rate)), rel=1e-6)


def test_figure_3_keeps_the_rows_of_a_step() -> None:
    rows = [row.experiment() for row in find("rank1/figure3", [FOLDER])]
    assert [e.method.members for e in rows] == [1, 2, 4, 8, 16]
    assert {e.method.members * e.train.batch for e in rows} == {512}


# The papers' numbers -------------------------------------------------------------------------------------------------------


def _text(paper: str) -> str:
    folder = Path(os.environ.get("SLIMBAYES_PAPERS", ROOT.parent / "shared" / "papers"))
    file = folder / PAPERS[paper]
    if not file.is_file():
        pytest.skip(f"the paper's text is not at {file}")
    return re.sub(r"\s+", " ", file.read_text(encoding="utf8").replace(r"\pm", "±").replace("$", ""))


def _pattern(numbers: list[float]) -> str:
    """These numbers one after another, whatever zeros, signs and words of fewer than 30 letters stand between."""
    return r"[^\d]{1,30}".join(
        rf"{re.escape(f'{abs(value):g}' if value < 1e4 else f'{value:,.0f}')}0*(?:\.0*)?%?(?!\d)" for value in numbers
    )


SPOTS = [
    f"rank1/{t}/{r}"
    for t in ("table1", "table2", "table3")
    for r in ("deterministic", "batch-ensemble", "rank1-gaussian", "rank1-cauchy")
]
SPOTS += [f"emp/table4/{r}" for r in ("emp", "emp-norm", "ecmp", "ecmp-norm", "dropout", "vanilla")] + [
    f"emp/table5/{r}" for r in ("emp", "ecmp", "dropout")
]
SPOTS += [f"emp/table{t}/imagenet-{s}" for t in (9, 10, 11) for s in (1, 20, 100, 200)]
SPOTS += [f"rank1/table8/rank1-gaussian-{s}" for s in (1, 4, 25)]


@pytest.mark.parametrize("name", SPOTS)
def test_numbers_stand_in_the_paper_in_this_order(name: str) -> None:
    (row,) = find(name, [FOLDER])
    numbers = [v for k, v in row.paper.numbers.items() if k != "parameters"]
    assert re.search(_pattern(numbers), _text(name.split("/")[0])), f"{numbers} is not a line of the paper"


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith("k_tied") and row.paper.errors], ids=ids)
def test_numbers_and_errors_of_the_k_tied_paper(row: Row) -> None:
    numbers, errors = row.paper.numbers, row.paper.errors
    text = _text("k_tied")
    for name, error in errors.items():
        found = rf"{re.escape(f'{numbers[name]:g}')}(?:\.0)?0* ± {re.escape(f'{error:g}')}0*(?!\d)"
        assert re.search(found, text), f"{name} {numbers[name]} ± {error} is not in the paper"


def test_regressions_are_the_earlier_transcription() -> None:
    """The stand-alone script's table was typed by somebody else."""
    text = (FOLDER / "emp" / "tables.py").read_text()
    for row in find("emp/table12", [FOLDER]) + find("emp/table13", [FOLDER]):
        if row.stem.split("-")[0] in ("boston", "concrete", "energy", "wine", "yacht"):
            (value,) = row.paper.numbers.values()
            assert re.search(rf"(?<![\d.]){re.escape(f'{abs(value):g}')}0*(?!\d)", text), row.name


def test_corruptions_of_table_5_are_all_fifteen() -> None:
    (row,) = find("emp/table5/emp", [FOLDER])
    assert [n.removeprefix("error_") for n in row.paper.numbers][1:] == list(CORRUPTIONS)


@pytest.mark.parametrize("paper", PAPERS)
def test_readmes_list_what_there_is(paper: str) -> None:
    text = (FOLDER / paper / "README.md").read_text(encoding="utf8")
    generated = text.partition("<!-- rows -->")[2].partition("<!-- end rows -->")[0].strip()
    assert generated == overview(paper), "put markdown.overview() between the comments"
