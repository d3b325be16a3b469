"""The papers' rows as configs: valid at both scales, of the printed size, with the hashes and numbers they had."""

import json
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import each
from oracle import shapes_alone
from paper_rows import FOLDER, ROOT, ROWS
from slimbayes_lab.configs.experiment import Experiment
from slimbayes_lab.configs.files import load, read_tree, row_names, validate
from slimbayes_lab.data.catalog import SOURCES
from slimbayes_lab.data.uci import UCI
from slimbayes_lab.models import keras_count
from slimbayes_lab.papers.diagnostics import DIAGNOSTICS
from slimbayes_lab.papers.rows import PaperRow, find, listings
from slimbayes_lab.report import kept
from slimbayes_lab.runs.predictor import build_network
from torch import nn

import slimbayes as sb
from slimbayes.layers.base import BayesLayer
from slimbayes.posteriors.configs import RECIPES

TRAINED = [row for row in ROWS if row.trains]
TABLES = sorted({row.name.rpartition("/")[0] for row in ROWS})
_IMAGES = {
    "cifar10": (10, 3, 32),
    "cifar100": (100, 3, 32),
    "mnist": (10, 1, 28),
    "digits": (10, 1, 8),
}
_TRAIN = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "mnist": 60_000,
    "digits": 1000,
    "imdb": 25_000,
}
_TRAIN |= {"physionet2012": 4000, "imagenet": 1_281_167}


def facts(name: str) -> dict[str, int]:
    """What the data would say about a network."""
    if name in _IMAGES:
        classes, channels, size = _IMAGES[name]
        return {
            "classes": classes,
            "channels": channels,
            "size": size,
            "inputs": channels * size**2,
            "vocabulary": 0,
        }
    if name.startswith("uci/"):
        return {
            "inputs": UCI[name.removeprefix("uci/")][1],
            "outputs": 1,
            "vocabulary": 0,
        }
    known = {
        "imagenet": {"classes": 1000, "channels": 3},
        "imdb": {"classes": 2, "inputs": 80, "vocabulary": 20_000},
    }
    return known.get(name) or {"classes": 2, "inputs": 4944, "vocabulary": 277}


def train_rows(experiment: Experiment) -> int:
    data = experiment.data
    rows = _TRAIN.get(data.name) or round(0.9 * UCI[data.name.removeprefix("uci/")][0])
    rows = min(rows, data.train_limit or rows)
    return (
        rows
        if isinstance(data.validation, str)
        else rows - round(rows * data.validation)
    )


_BUILT: dict[str, nn.Module] = {}


def _built(experiment: Experiment) -> nn.Module:
    task: Any = SimpleNamespace(
        name=experiment.data.name, fills=lambda: facts(experiment.data.name)
    )
    with shapes_alone():
        return build_network(experiment, task)


def built(experiment: Experiment) -> nn.Module:
    """The converted network on the meta device; rows that share one share the work, as do those whose methods differ in
    fractions alone: widths, rates and scales, of which a network on that device has no values."""
    experiment.method.build()  # refuses fractions that are wrong
    tree = {
        "train": {"epochs": 1, "optimizer": {"kind": "SGD"}},
        "name": "one",
        "data": {"name": experiment.data.name},
    }
    tree |= {
        key: experiment.resolved[key]
        for key in ("model", "method", "include", "exclude")
    }
    kind = json.dumps(_without_fractions(tree))
    if kind not in _BUILT:
        _BUILT[kind] = _built(Experiment.model_validate(tree))
    return _BUILT[kind]


def _without_fractions(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_fractions(value) for key, value in tree.items()}
    return "fraction" if isinstance(tree, float) else tree


def ids(row: PaperRow) -> str:
    return row.name


def test_every_table_and_figure_is_there() -> None:
    wanted = {
        "rank1": {"table": (1, 2, 3, 4, 8), "figure": (1, 2, 3, 4, 5, 6, 9)},
        "k_tied": {"table": (2, 3, 4, 5), "figure": (3, 4, 5, 6, 7, 9, 10, 11, 12)},
        "emp": {"table": (4, 5, 6, 7, 8, *range(9, 14)), "figure": (3, 4, 5, 6)},
    }
    names = {
        f"{paper}/{kind}{n}"
        for paper, kinds in wanted.items()
        for kind, which in kinds.items()
        for n in which
    }
    found = listings([FOLDER])
    assert names <= found.keys()
    assert all(
        place.lower()
        .replace(" ", "")
        .replace("figures", "figure")
        .startswith(name.partition("/")[2])
        for name, (place, _) in found.items()
        if name in names
    )
    assert (
        sum(rows for name, (_, rows) in found.items() if name.startswith(tuple(wanted)))
        == 416
    )


def test_files_say_what_they_are_for() -> None:
    files = list(FOLDER.rglob("*.yaml"))
    assert len(files) <= 70 and all(file.read_text().startswith("# ") for file in files)


# Hashes of configs: records are found by them.
HASHES = {
    "rank1/table1.yaml#rank1-cauchy": ("58124587152b", "12c912a283df"),
    "rank1/table3.yaml#deep-ensemble-5": ("a2ab176bdbdf", "465111020f1e"),
    "rank1/table4.yaml#rank1-gaussian": ("1eb1ed812336", "110d34684da2"),
    "rank1/figure3.yaml#members-16": ("a4111656c34b", "a3d446356676"),
    "rank1/figure9.yaml#positive": ("2b694730c9ed", "3c0f9e6d0857"),
    "k_tied/figure6.yaml#cifar100-2-tied": ("938884edf095", "a610dc832f07"),
    "k_tied/figure6.yaml#imdb-3-tied": ("014d0faf5ea0", "dae8d3b1532e"),
    "k_tied/figure6-snr.yaml#mean-field-step-5000": ("c978fafff243", "eef4d9526405"),
    "k_tied/figure9.yaml#1-tied": ("f5aaebbe7176", "1a369703b9d0"),
    "k_tied/figure10.yaml#epochs-200": ("ea8c8dae9f37", "e91dd536ead5"),
    "emp/table5.yaml#vanilla": ("581b232cc371", "d066492dd974"),
    "emp/table10.yaml#cifar100-20": ("9f367c51c5d7", "bdd793ce7d23"),
    "emp/table12.yaml#year-ensemble": ("915efda3815a", "fbda80edc57a"),
    "emp/table13.yaml#yacht-ecmp": ("098051e1e736", "f398cc904370"),
    "cifar10/methods.yaml#ecmp": ("cf7b5dbc22e3", "c68460276818"),
    "demo/digits.yaml#4-two-tied": ("ed2d39a0ccec", "ed2d39a0ccec"),
    "rank1/mortality.yaml#fully-bayesian": ("5fc6bd0fd556", "752344baa547"),
}  # fmt: skip


@pytest.mark.parametrize("place", HASHES)
def test_configs_keep_their_hashes(place: str) -> None:
    assert (
        tuple(load(FOLDER / place, (), scale).hash for scale in ("full", "small"))
        == HASHES[place]
    )


@pytest.mark.slow
def test_kept_records_are_those_of_their_tables() -> None:
    """<paper>.jsonl/<table>-small has runs of that table's rows, each by the hash of its config."""
    runs = 0
    results = ROOT / "lab" / "results"
    folders = [
        file.parent
        for paper in ("rank1", "k_tied", "emp")
        for file in kept.glob(results / f"{paper}.jsonl", "*-small/table.json")
    ]
    for folder in folders:
        rows = find(
            f"{folder.parent.stem}/{folder.name.removesuffix('-small')}", [FOLDER]
        )
        table = kept.load(folder / "table.json")
        assert [row["row"] for row in table["rows"]] == [row.stem for row in rows]
        assert [row["paper"] for row in table["rows"]] == [
            row.paper.numbers for row in rows
        ]
        seeds = {seed for row in table["rows"] for seed in row["seeds"]}
        known = {row.experiment("small", seed).hash for row in rows for seed in seeds}
        for file in kept.glob(folder, "*/record.json"):
            record = kept.load(file)
            assert validate(record["config"]).hash == record["config_hash"]
            assert record["config_hash"] in file.parent.name
            redone = (
                "deep-ensemble" in file.parent.name
            )  # rank 1's Table 2: its row now sums the loss over members
            assert redone or record["config_hash"] in known, (
                f"{file} is no row of the table"
            )
            runs += 1
    assert runs > 100


def rows_of(table: str) -> list[PaperRow]:
    return [row for row in ROWS if row.name.rpartition("/")[0] == table]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_a_row_is_valid_at_both_scales(table: str) -> None:
    for row in rows_of(table):
        try:
            _check_row(row)
        except Exception as error:
            error.add_note(row.name)
            raise


def _check_row(row: PaperRow) -> None:
    paper = row.paper
    assert (paper.table is None) != (paper.figure is None)
    assert paper.numbers or paper.shows or not row.trains, "nothing to show"
    assert set(paper.diagnostic) <= set(DIAGNOSTICS)
    assert set(paper.errors) <= set(paper.numbers)
    assert paper.relative_to is None or paper.relative_to in row_names(
        read_tree(row.file)
    )
    if row.trains:
        full, small = row.experiment("full"), row.experiment("small")
        assert {full.data.name, small.data.name} <= {*SOURCES, "digits"}
        assert (
            paper.draws is None
            or paper.draws in full.evaluate.draws
            or not _draws(full)
        )
        assert small.data.name != "imagenet"
        steps = small.train.epochs * max(1, train_rows(small) // small.train.batch)
        assert steps <= 2000, "small runs are for a minute or so"
        assert small.train.epochs <= full.train.epochs


def _draws(experiment: Experiment) -> bool:
    """Whether a network is random at all."""
    return (
        experiment.method.kind not in ("Deterministic", "Ensemble")
        and experiment.data.name != "imagenet"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "table"), each(["full", "small"], TABLES))
def test_its_network_builds_and_converts(table: str, scale: Any) -> None:
    for row in (row for row in rows_of(table) if row.trains):
        experiment = row.experiment(scale)
        found = _summary(built(experiment))
        assert found.after >= found.before, row.name
        converted = any(line.status == "converted" for line in found.rows)
        assert converted or experiment.method.kind in ("Deterministic", "Ensemble"), (
            row.name
        )


@cache
def _summary(network: nn.Module) -> sb.Summary:
    return sb.summary(network)


# Sizes

# Parameters by our own count of the papers' networks; what is printed is rounded, or wrong where MISPRINTED says so.
EXACT = {
    "rank1/table1/deterministic": 25_557_032,
    "rank1/table1/batch-ensemble": 25_768_588,
    "rank1/table1/rank1-gaussian": 25_977_144,
    "rank1/table1/rank1-cauchy": 25_977_144,
    "rank1/table2/deterministic": 36_479_194,
    "rank1/table2/batch-ensemble": 36_557_548,
    "rank1/table2/rank1-gaussian": 36_635_872,
    "rank1/table2/rank1-cauchy": 36_635_872,
    "rank1/table2/deep-ensemble-5": 4 * 9_132_634,
    "rank1/table3/deterministic": 36_536_884,
    "rank1/table3/batch-ensemble": 36_615_868,
    "rank1/table3/rank1-gaussian": 36_694_552,
    "rank1/table3/deep-ensemble-5": 4 * 9_161_524,
    "emp/table4/emp": 13_779_912,
    "emp/table4/ecmp": 13_779_912,
    "emp/table4/emp-norm": 11_727_912,
    "emp/table4/vanilla": 11_689_512,
    "emp/table4/dropout": 11_689_512,
    "emp/table6/emp": 28_825_299,
    "emp/table6/ecmp": 28_825_299,
    "emp/table6/vanilla": 28_511_307,
    "emp/table12/boston-ecmp": 13 * 50 + 50 + 50 + 1 + 5 * 2 * 63,
    "emp/table12/boston-dropout": 13 * 50 + 50 + 50 + 1,
    "emp/table12/boston-ensemble": 5 * (13 * 50 + 50 + 50 + 1),
    "k_tied/figure6/mnist-mean-field": 956_820,
    "k_tied/figure6/mnist-1-tied": 481_614,
    "k_tied/figure6/mnist-2-tied": 484_008,
    "k_tied/figure6/mnist-3-tied": 486_402,
    "k_tied/figure6/cifar100-mean-field": 4_405_320,
    "k_tied/figure6/cifar100-1-tied": 2_262_188,
    "k_tied/figure6/cifar100-2-tied": 2_267_408,
    "k_tied/figure6/cifar100-3-tied": 2_272_628,
    "k_tied/figure6/imdb-mean-field": 2_822_656,
    "k_tied/figure6/imdb-1-tied": 2_692_864,
    "k_tied/figure6/imdb-2-tied": 2_694_144,
    "k_tied/figure6/imdb-3-tied": 2_695_424,
    "k_tied/table5/mean-field": 9_814_026,
    "k_tied/table5/1-tied": 4_929_711,
    "k_tied/table5/2-tied": 4_946_964,
    "k_tied/table5/3-tied": 4_964_217,
}
MISPRINTED = {
    "rank1/table1/deep-ensemble",
    "rank1/table2/deep-ensemble-5",
    "rank1/table3/deep-ensemble-5",
    "rank1/table3/rank1-gaussian",
    "rank1/table3/rank1-cauchy",
    "k_tied/figure6/cifar100-2-tied",
}


def count(row: PaperRow) -> int:
    """Trainable parameters; of the k-tied paper's networks all that Keras counts, as the diagnostics do."""
    network, options = built(row.experiment()), row.paper.options
    if {"elbo", "truncation"} & set(row.paper.diagnostic):
        return (
            keras_count(network)
            - options.get("uncounted", 0)
            + _tied(network, options.get("rank"))
        )
    return _summary(network).after


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_sizes_are_the_papers(name: str) -> None:
    (row,) = find(name, [FOLDER])
    assert count(row) == EXACT[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in TRAINED if {"parameters", "overhead"} & row.paper.numbers.keys()],
    ids=ids,
)
def test_printed_sizes_are_ours_rounded(row: PaperRow) -> None:
    """Rounded to the digits printed, but for the misprints."""
    numbers = row.paper.numbers
    if "overhead" in numbers:
        table = _summary(built(row.experiment()))
        assert 100 * (table.after / table.before - 1) == pytest.approx(
            numbers["overhead"], rel=0.01, abs=1e-9
        )
        return
    unit = {"k": 1e3, "M": 1e6}.get(row.paper.units.get("parameters", ""), 1.0)
    digits = len(f"{numbers['parameters']:g}".partition(".")[2])
    near = abs(count(row) / unit - numbers["parameters"]) <= 0.5 * 10**-digits
    assert near != (row.name in MISPRINTED)


def _tied(network: nn.Module, rank: int | None) -> int:
    """What k-tied factors save against free scales."""
    layers = [layer for layer in network.modules() if isinstance(layer, BayesLayer)]
    sizes = [
        posterior.site.matrix
        for layer in layers
        for posterior in layer.posterior.values()
    ]
    return 0 if rank is None else sum(rank * (m + n) - m * n for m, n in sizes)


@pytest.mark.slow
def test_rows_that_share_a_config_share_a_run() -> None:
    """The two tables of regressions come from the same runs, as do post-hoc truncations and numbers of draws."""

    def runs(name: str) -> set[str]:
        return {row.experiment().hash for row in find(name, [FOLDER])}

    counts = {
        "emp/table12": 40,
        "k_tied/table2": 3,
        "k_tied/table5": 1,
        "rank1/table8": 3,
        "emp/table9": 4,
    }
    assert {name: len(runs(name)) for name in counts} == counts
    assert runs("emp/table12") == runs("emp/table13") and runs("rank1/table8") <= runs(
        "rank1/table2"
    )


# Settings that are easy to get wrong


def test_rank1_settings_are_table_5s() -> None:
    for name, prior, mean, decay in (
        ("table2/rank1-gaussian", 0.1, 0.5, 2e-4),
        ("table3/rank1-cauchy", 0.01, 1.0, 6e-4),
    ):
        (row,) = find(f"rank1/{name}", [FOLDER])
        experiment = row.experiment()
        method = experiment.method.build()
        assert (method.prior.loc, method.prior.scale) == (1.0, prior)
        assert (method.mean_init.loc, method.mean_init.scale) == (1.0, mean)
        assert experiment.train.weight_decay == decay
        rate = 1e-3 if "gaussian" in name else 1e-6
        assert method.scale_init == pytest.approx(
            math.sqrt(rate / (1 - rate)), rel=1e-6
        )


def test_scales_of_the_resnet_start_as_the_k_tied_paper_says() -> None:
    """D.2: log standard deviations from Normal(-9, 0.1). A jitter of a tenth of the scale is that to first order."""
    (row,) = find("k_tied/table5/mean-field", [FOLDER])
    torch.manual_seed(0)
    net: Any = sb.bayesianize(nn.Linear(200, 300), row.experiment().method.build())
    started = net.posterior["weight"].log_scale().detach().double()
    assert float(started.mean()) == pytest.approx(-9.0, abs=0.01)
    assert float(started.std()) == pytest.approx(0.1, rel=0.02)


def test_figure_3_keeps_the_rows_of_a_step() -> None:
    rows = [row.experiment() for row in find("rank1/figure3", [FOLDER])]
    assert [e.method.members for e in rows] == [1, 2, 4, 8, 16]
    assert {e.method.members * e.train.batch for e in rows} == {512}


def test_settings_that_are_printed_without_a_table() -> None:
    """k-tied, D.2 and D.4: batches, candidates, no annealing where gradients are looked at. EMP, 5 and C.1: five
    components, Adam's defaults, L2 of 0.001 / batch size for all four sums."""
    tied = {row.stem: row.experiment() for row in find("k_tied/figure7")}
    batches = {e.data.name: e.train.batch for e in tied.values()}
    assert batches == {"mnist": 1024, "cifar100": 1024, "imdb": 128}
    assert all(
        e.train.kl_weight(step, 48) == 1.0
        for e in tied.values()
        for step in (0, 1000, 14_399)
    )
    tried = [row.experiment() for row in find("k_tied/selection/mnist-*")]
    chosen = {
        (e.method.model_dump()["prior"]["scale"], e.train.optimizer.lr) for e in tried
    }
    assert chosen == {
        (scale, rate) for scale in (0.2, 0.3) for rate in (1e-4, 3e-4, 1e-3, 3e-3)
    }
    slopes = [
        row.experiment().train.kl_weight
        for row in find("k_tied/selection-slope/mnist-2-tied-*")
    ]
    assert sorted(at(1000, 48) for at in slopes) == pytest.approx([0.005, 0.05])
    for row in (row for name in ("emp/table4", "emp/table6") for row in find(name)):
        train, method = row.experiment().train, row.experiment().method.model_dump()
        assert (
            method.get("components", 5) == 5
            and train.optimizer.kind == "Adam"
            and train.optimizer.lr == 1e-3
        )
        assert train.l2 is not None and set(train.l2.model_dump().values()) == {
            0.001 / 256
        }


def test_recipes_run_on_cifar_as_they_are_given_to_users() -> None:
    names = {
        "batchensemble": "BatchEnsemble", "rank1-normal": "rank-1 Normal", "rank1-cauchy": "rank-1 Cauchy",
        "ktied": "2-tied", "mfvi": "mean-field", "emp": "EMP", "ecmp": "ECMP",
    }  # fmt: skip
    assert set(names.values()) == set(RECIPES)
    for data in ("cifar10", "cifar100"):
        for row, name in names.items():
            found, (config, temperature) = (
                load(FOLDER / f"cifar10/recipes.yaml#{data}-{row}"),
                sb.recipe(name, "scratch"),
            )
            assert found.method.build() == config and found.data.name == data
            assert found.train.kl is not None and found.train.kl.weight == temperature
