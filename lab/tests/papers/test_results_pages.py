"""Pages made of kept records: verdicts on the papers' claims, CIFAR-10's main table and how its rows were chosen."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import main_table
import verdicts
from slimbayes_lab.configs.files import load, read_tree, row_names
from slimbayes_lab.report import kept
from slimbayes_lab.report.record import (
    Evaluation,
    ParameterCounts,
    Record,
    RunCost,
    read,
)

ROOT = Path(__file__).parents[3]
METHODS = ROOT / "lab" / "experiments" / "cifar10" / "methods.yaml"
SOURCE = {"at": "here", "setting": "a test", "command": "run it", "records": "*.json"}


def record(
    name: str, seed: int, nll: float, corrupted: float = 1.0, total: int = 101
) -> Record:
    def scored(
        role: Any, data: str, scores: dict[str, float], **about: Any
    ) -> Evaluation:
        return Evaluation(
            data=data, role=role, draws=1, rows=10, metrics=scores, **about
        )

    scores = {"nll": nll, "accuracy": 0.9, "ece": 0.01}
    made = [
        scored("test", "cifar10", scores), scored("shift", "cifar10h", scores | {"nll": 2 * nll}),
        scored("corruption", "cifar10", scores | {"nll": corrupted}, corruption="fog", severity=1),
        scored("ood", "cifar100", {"auroc": 0.8}),
    ]  # fmt: skip
    return Record(
        name=name, method=name, data="cifar10", seed=seed, config={"train": {"epochs": 40}}, config_hash="",
        commands=[], parameters=ParameterCounts(plain=100, total=total), evaluations=made,
        cost=RunCost(train_seconds=1, seconds_per_epoch=1),
    )  # fmt: skip


def keep(folder: Path, *records: Record) -> None:
    for one in records:
        (folder / f"{one.name}-{one.seed}.json").write_text(one.model_dump_json())


# Verdicts


@pytest.mark.slow
def test_the_page_of_verdicts_is_what_the_records_say() -> None:
    assert verdicts.PAGE.read_text() == verdicts.page(
        yaml.safe_load(verdicts.CLAIMS.read_text())
    )


@pytest.mark.parametrize(
    ("ours", "more", "verdict"),
    [
        ((0.4, 0.41, 0.39), {}, "holds"),
        ((0.6, 0.61, 0.59), {}, "does not hold"),
        ((0.6, 0.4, 0.45), {}, "undecided"),
        (
            (0.49, 0.4, 0.3),
            {},
            "undecided",
        ),  # three on one side are what chance gives once in four times
        ((0.4, 0.41), {}, "undecided"),  # two seeds decide nothing
        ((), {}, "not run"),
        ((0.51, 0.515, 0.51), {"margin": 0.02}, "holds"),
        ((0.51, 0.515, 0.51), {"than": 0.6}, "holds"),
        ((0.4, 0.41, 0.39), {"less": False}, "does not hold"),
    ],
)
def test_verdicts_by_paired_differences(
    tmp_path: Path, ours: tuple[float, ...], more: dict[str, Any], verdict: str
) -> None:
    keep(tmp_path, *(record("plain", seed, 0.5) for seed in range(3)))
    keep(tmp_path, *(record("mine", seed, nll) for seed, nll in enumerate(ours)))
    evidence = {"source": "a", "better": "mine", "than": "plain", "score": "nll"} | more
    (found,) = verdicts.judged(evidence, {"a": SOURCE}, tmp_path)
    assert found.verdict == verdict and found.where == "here"


def test_a_claim_holds_where_its_evidence_does(tmp_path: Path) -> None:
    for name, gap in (("boston", 0.5), ("kin", -0.5), ("yacht", -0.5)):
        for method, shift in (("emp", gap), ("dropout", 0.0)):
            rmse = [1.0 + split + shift for split in range(4)]
            found = {"set": name, "method": method, "epochs": 4, "rmse": rmse}
            (tmp_path / f"{name}-{method}.splits").write_text(json.dumps(found))
    source = SOURCE | {"splits": "*.splits"}
    del source["records"]
    evidence = {
        "source": "a",
        "data": "*",
        "better": "emp",
        "than": "dropout",
        "score": "rmse",
    }
    every = verdicts.judged(evidence, {"a": source}, tmp_path)
    assert [(one.where, one.verdict) for one in every] == [
        ("boston", "does not hold"), ("kin", "holds"), ("yacht", "holds"),
    ]  # fmt: skip
    assert verdicts.summed(every) == "holds when: kin; yacht"
    assert (
        verdicts.summed(every[:1]) == "does not hold"
        and verdicts.summed([]) == "not run"
    )


def test_stars_pair_rows_of_a_table(tmp_path: Path) -> None:
    rows = [
        {"row": f"{kind}-{step}", "seeds": [0], "files": [], "ours": {"snr": {"mean": factor * step}}}
        for kind, factor in (("tied", 2.0), ("free", 1.0)) for step in (4, 5, 6)
    ]  # fmt: skip
    (tmp_path / "table.json").write_text(json.dumps({"rows": rows}))
    source = {"at": "t", "setting": "", "command": "", "table": "table.json"}
    evidence = {
        "source": "a",
        "better": "tied-*",
        "than": "free-*",
        "score": "snr",
        "less": False,
    }
    (found,) = verdicts.judged(evidence, {"a": source}, tmp_path)
    assert (
        found.verdict == "holds"
        and found.effect.startswith("+5 ")
        and found.effect.endswith("3 pairs")
    )


# The main table


@pytest.mark.slow
def test_readme_and_the_pages_of_cifar10_are_made_of_the_records() -> None:
    records = main_table.kept_records()
    table = main_table.block(
        records,
        longer=main_table.kept_attempts(),
        hundred=main_table.kept_records(main_table.HUNDRED),
    )
    for file, text in (
        (ROOT / "README.md", main_table.lead(records)),
        (ROOT / "docs" / "cifar10.md", table),
        (METHODS.parent / "README.md", main_table.cifar_page()),
    ):
        page = file.read_text()
        assert main_table.between(page, main_table.MARKS, text) == page
    assert (ROOT / "docs" / "cifar10.svg").read_text() == main_table.figure(
        main_table.methods(records)
    )


def test_the_lead_says_who_is_better_and_worse_than_plain() -> None:
    seeds = range(4)
    records = [
        record("plain", seed, 0.5 + 0.01 * seed, 1.0, total=100) for seed in seeds
    ]
    records += [record("EMP", seed, 0.4 + 0.01 * seed, 0.9) for seed in seeds]
    records += [record("rank-1 Normal", seed, 0.6 + 0.01 * seed, 0.9) for seed in seeds]
    text = " ".join(main_table.lead(records).split())
    assert "On clean images EMP has a lower NLL than plain beyond noise" in text
    assert "1 of 2 have a higher one, rank-1 Normal among them (0.615)" in text
    assert "| EMP |" in text and "| rank-1 Normal |" not in text


def test_the_table_marks_what_differs_from_plain_beyond_noise() -> None:
    seeds = range(4)
    records = [
        record("plain", seed, 0.5 + 0.01 * seed, 1.0, total=100) for seed in seeds
    ]
    records += [
        record("rank-1", seed, 0.4 + 0.01 * seed, 1.2 + 0.01 * seed) for seed in seeds
    ]
    records += [record("noisy", seed, 0.5 + 0.03 * (-1) ** seed, 0.9) for seed in seeds]
    text = main_table.block(records, {"rank-1": 41.6})
    assert (
        "| rank-1 | 1.0% | 42 | 0.415 + | 90.00 | 0.0100 | 1.215 - |" in text
        and "| noisy | 1.0% |  | 0.500 |" in text
    )
    assert (
        "clean images rank-1 is best (0.415, plain 0.515). Better than plain beyond noise: rank-1. Worse: 0 of 2"
        in text
    )
    assert (
        "ones noisy is best (0.900, plain 1.000). Better than plain beyond noise: noisy. Worse: 1 of 2."
        in text
    )
    assert "4 seeds" in text and "cost of 40 epochs" in text
    assert "no records yet" in main_table.block([], {})
    unshifted = [
        r.model_copy(
            update={"evaluations": [e for e in r.evaluations if e.role != "shift"]}
        )
        for r in records
    ]
    page = main_table.hundred_page(unshifted)
    assert "CIFAR-10H" not in page and "CIFAR-10H" in main_table.hundred_page(records)
    assert (
        "| rank-1 | 1.0% | 0.415 + | 90.00 |" in page
        and "clean images rank-1 is best (0.415" in page
    )
    assert "The same settings on CIFAR-100" in main_table.block(
        records, {}, hundred=records
    )
    assert "no records of CIFAR-100" in main_table.hundred_page([])
    drawn = main_table.figure(main_table.methods(records))
    assert (
        drawn.count("<circle") == 6
        and ">rank-1</text>" in drawn
        and ">0.90</text>" in drawn
    )
    assert "Not judged" not in text and "deep ensemble" not in text
    rival = [record("deep ensemble", seed, 0.52, 1.3, total=400) for seed in seeds]
    large = [record("large", seed, 0.3, 0.3, total=150) for seed in seeds]
    beside = main_table.block(records + rival + large, {})
    assert (
        "at most 2% more parameters, rank-1; noisy are below the deep ensemble's means (0.520 and 1.300)"
        in beside
    )
    some = main_table.block(
        [one for one in records if one.name != "noisy" or one.seed < 2], {}
    )
    assert "Not judged yet, with fewer than 3 seeds: noisy." in some
    few = main_table.block([one for one in records if one.seed < 2], {})
    assert (
        "Fewer than 3 seeds" in few
        and "Better than plain: rank-1; noisy. Worse: 0 of 2." in few
    )


def test_every_attempt_is_shown_by_cost_and_validation_rows_and_held_against_the_ensemble() -> (
    None
):
    def attempt(
        name: str,
        epochs: int,
        validation: float,
        nll: float,
        corrupted: float,
        total: int = 101,
    ) -> Record:
        made = record(f"moonshot-{name}", 0, nll, corrupted, total)
        held = made.evaluations[0].model_copy(
            update={"role": "validation", "metrics": {"nll": validation}}
        )
        config = {"train": {"epochs": epochs}}
        return made.model_copy(
            update={"evaluations": [*made.evaluations, held], "config": config}
        )

    rival, plain = (
        attempt("ensemble", 10, 0.26, 0.25, 0.98, total=400),
        attempt("plain", 40, 0.22, 0.17, 1.2, 100),
    )
    mine = [attempt("emp", 37, 0.21, 0.18, 0.93), attempt("near", 29, 0.20, 0.26, 1.1)]
    longer = [
        attempt("long-ensemble", 40, 0.15, 0.14, 0.9, 400),
        attempt("long-plain", 160, 0.18, 0.16, 1.1, 100),
    ]
    longer.append(attempt("long-emp", 150, 0.17, 0.15, 0.85))
    text = main_table.attempts([*longer, rival, plain, *mine])
    assert [line.split(" | ")[:2] for line in text.splitlines() if " | " in line] == [
        ["| cost", "attempt"], *(["| 40 plain epochs", name] for name in ("near", "emp", "plain", "ensemble")),
        *(["| 160 plain epochs", name] for name in ("ensemble", "emp", "plain")),
    ]  # fmt: skip
    assert (
        "| 40 plain epochs | emp | 1.0% | 0.210 | 0.180 | 90.00 | 0.930 | 1 |" in text
    )
    short, long = (line for line in text.splitlines() if line.startswith("- "))
    assert (
        "Cost 40 plain epochs: " in short
        and "for 10 epochs each, NLL 0.250 and 0.980 on" in short
    )
    assert (
        "parameters: on both emp; on clean ones alone plain; on neither near. " in short
    )
    assert short.endswith("is reached by emp.")
    assert (
        "Cost 160 plain epochs" in long
        and "on corrupted ones alone emp; on neither plain. " in long
    )
    assert "for 40 epochs each" in long and long.endswith("is reached by none.")
    assert "nothing can be said" in main_table.attempts(
        mine
    ) and "none has been run" in main_table.attempts([])
    told = main_table.summit([rival, *longer, plain, *mine])
    assert (
        "0.140 and 0.900 for the ensemble of four and 0.160 and 1.100 for the plain network"
        in told
    )
    assert "0.150 and 0.850 for emp," in told and "(1 seed, on nine tenths" in told
    assert main_table.summit([]) == main_table.summit(longer[1:]) == ""
    assert "network; none of the attempts" in main_table.summit(longer[:2])


def test_costs_are_epochs_times_what_one_takes(tmp_path: Path) -> None:
    assert main_table.costs(tmp_path) == {}
    timed = [
        {"case": "plain", "seconds_per_epoch": 0.5},
        {"case": "ensemble", "seconds_per_epoch": 2.5},
    ]
    (tmp_path / "cost.json").write_text(json.dumps({"results": timed}))
    epochs = load(f"{METHODS}#ensemble").train.epochs
    plain = load(f"{METHODS}#plain").train.epochs
    assert main_table.costs(tmp_path) == {"plain": plain, "deep ensemble": 5.0 * epochs}


def test_records_are_taken_from_run_directories_without_the_folders_of_their_machine(
    tmp_path: Path,
) -> None:
    run = tmp_path / "from" / "methods" / "rank-1-Normal-0123"
    run.mkdir(parents=True)
    made = record("rank-1 Normal", 3, 0.4)
    made.commands.append(
        "slimbayes fit /home/me/runs/methods/a/config.yaml --out /b/runs/methods/a --data-dir ~/my/data"
    )
    (run / "record.json").write_text(made.model_dump_json())
    main_table.take(tmp_path / "from", tmp_path / "to")
    taken = read(tmp_path / "to" / "cifar10.jsonl" / "methods" / "rank-1-normal-3.json")
    assert taken.seed == 3
    assert taken.commands == [
        "slimbayes fit runs/methods/a/config.yaml --out runs/methods/a --data-dir data"
    ]


def test_the_rows_are_the_candidates_that_validation_rows_chose() -> None:
    tuned = [
        read(file)
        for file in kept.records(ROOT / "lab" / "results" / "cifar10.jsonl" / "tune")
    ]

    def loss(one: Record) -> float:
        return min(e.metrics["nll"] for e in one.evaluations if e.role == "validation")

    for row in row_names(read_tree(METHODS)):
        experiment = load(f"{METHODS}#{row}")
        mine = [
            one
            for one in tuned
            if one.name.startswith(f"tune-{row.removesuffix('-tiled')}-")
        ]
        best = min(mine, key=loss)
        assert (
            len(mine) == 3
            and experiment.resolved["method"] | best.config["method"]
            == experiment.resolved["method"]
        )
        share = (
            4 if best.config["method"]["kind"] == "Ensemble" else 1
        )  # recorded with the mean over members
        assert experiment.train.weight_decay == pytest.approx(
            share * best.config["train"]["weight_decay"]
        )
        assert experiment.train.kl.weight == best.config["train"]["kl"]["weight"]


def test_all_rows_cost_the_same_by_measured_epochs() -> None:
    """Epochs times the seconds of one that has the GPU to itself, within a tenth of the plain network's."""
    timed = json.loads(
        (ROOT / "lab" / "results" / "benchmarks" / "lab_h200.json").read_text()
    )["results"]
    seconds = {
        one["case"]: one["seconds_per_epoch"] for one in timed if one["mode"] == "graph"
    }
    cases = {
        "rank1-normal": "rank1-split", "rank1-cauchy": "rank1-split", "batchensemble": "rank1-split",
        "rank1-normal-tiled": "rank1", "rank1-cauchy-tiled": "rank1", "emp": "emp", "ecmp": "ecmp",
    }  # fmt: skip
    budget = load(f"{METHODS}#plain").train.epochs
    for row, case in cases.items():
        cost = load(f"{METHODS}#{row}").train.epochs * seconds[case] / seconds["plain"]
        assert cost == pytest.approx(budget, rel=0.1), row
    assert load(f"{METHODS}#ensemble").train.epochs == budget // 4


@pytest.mark.slow
def test_no_kept_record_names_a_folder_of_the_machine_that_made_it() -> None:
    """A command is to be run by others, from the root of a checkout."""
    files = [
        file
        for paper in (ROOT / "lab" / "results").glob("*.jsonl")
        for file in kept.records(paper)
    ]
    told = {
        word
        for file in files
        for line in kept.load(file)["commands"]
        for word in line.split()
    }
    assert files and not [
        word for word in told if word.startswith(("/", "~", "--out=/", "--data-dir=/"))
    ]
