"""benchmarks/gpu.py in tiny sizes on a CPU: every case runs or says what fails; the page says what the record holds."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu
import gpu_cases
import performance_page
import timing

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CASES = {
    name: case
    for name, case in gpu_cases.CASES.items()
    if name not in ("pyramid-ecmp", "small")
}


def run(name: str) -> list[dict[str, Any]]:
    args = argparse.Namespace(
        sizes="tiny",
        device="cpu",
        rounds=1,
        lock=None,
        part=None,
        build=False,
        until=0.0,
        rank=0,
    )
    return gpu.run_job(name, args)


def absent(row: dict[str, Any]) -> bool:
    """A rival's package, or the network's own, is optional."""
    return row.get("error", "").startswith("ModuleNotFoundError")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["mlp"])  # all: benchmarks/gpu.py --sizes tiny
def test_every_variant_of_a_case_is_timed_beside_the_plain_network(name: str) -> None:
    rows = run(f"{name}:eager")
    wanted = [
        method
        for method, variant in CASES[name].variants.items()
        if method == "plain" or not variant.whole
    ]
    assert [row["method"] for row in rows] == wanted
    for row in (row for row in rows if not absent(row)):
        assert "error" not in row, row
        for kind in CASES[name].kinds:
            assert (
                row[f"{kind}_ms"] > 0
                and row[f"{kind}_ratio"] > 0
                and row[f"{kind}_profile"]["kernels"] > 0
            ), row
    if not absent(rows[0]):
        assert rows[0]["train_ratio"] == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_variants_see_the_same_rows_and_train_what_they_say(name: str) -> None:
    case = CASES[name]
    for method, variant in case.variants.items():
        try:
            trial = gpu_cases.Trial(case.works["tiny"], variant, CPU, compiled=False)
        except ModuleNotFoundError:
            continue
        outputs, work = trial.predict(), case.works["tiny"]
        assert outputs.shape[: 2 if variant.sampled else 1].numel() == work.rows
        before = {n: p.detach().clone() for n, p in trial.model.named_parameters()}
        trial.train()
        moved = {
            n
            for n, p in trial.model.named_parameters()
            if not torch.equal(p, before[n])
        }
        own = {
            n
            for n, p in trial.model.named_parameters()
            if ".posterior." not in n and "lora" not in n
        }
        assert moved, method
        assert bool(moved & own) != ("frozen" in method or "LoRA" in method), method


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["members", "ranks", "sharing"]
)  # depth and width are as members
def test_scale_is_measured(name: str) -> None:
    rows = run(f"scale-{name}:eager")
    assert len(rows) >= 2 and not [row for row in rows if "error" in row]
    assert all(row.get("train_ms", row.get("predict_ms", 0)) > 0 for row in rows)


def test_jobs_that_compile_come_first_and_a_cpu_has_its_own() -> None:
    names = gpu.job_names("gpu")
    eager = [name.endswith(":eager") for name in names]
    assert (
        eager == sorted(eager) and "lab:graph" in names and "scale-ranks:eager" in names
    )
    assert {"mlp:compiled", "dense:eager", "small:eager"} <= set(gpu.job_names("cpu"))
    assert "gpt2:eager" not in gpu.job_names("cpu")


def test_a_job_has_all_modes_of_a_case_and_what_was_never_timed_comes_first() -> None:
    names = [
        "gpt2:compiled",
        "vit:compiled",
        "lab:graph",
        "gpt2:eager",
        "vit:eager",
        "scale-draws:eager",
    ]
    ranks = dict(
        gpu.job_list(
            names, good={"gpt2:compiled", "gpt2:eager", "vit:eager", "lab:graph"}
        )
    )
    assert list(ranks)[:2] == ["gpt2:compiled,eager", "vit:compiled,eager"]
    assert sorted(ranks, key=ranks.__getitem__)[:2] == [
        "vit:compiled,eager",
        "gpt2:compiled,eager",
    ]
    assert (
        max(ranks, key=ranks.__getitem__) == "scale-draws:eager"
        and "lab:graph:rank1-split" in ranks
    )


def test_what_fails_displaces_no_time_and_what_is_timed_displaces_older_rows(
    tmp_path: Path,
) -> None:
    args = {
        "out": tmp_path / "new.json",
        "device": "cpu",
        "sizes": "tiny",
        "rounds": 1,
        "resume": None,
        "again": "",
    }
    record = gpu.Record(argparse.Namespace(**args))
    plain = {"case": "mlp", "mode": "eager", "sizes": "MLP", "method": "plain"}
    record.add("mlp:eager", [plain | {"train_ms": 1.0, "older": True}])
    record.add("mlp:eager", [plain | {"peak_mib": 7.0}], ended=False)
    record.add("mlp:eager", [plain | {"error": "TypeError: no"}])
    assert [row["train_ms"] for row in record.data["results"]] == [1.0]
    assert record.data["not_run"] == ["mlp, eager, plain: TypeError: no"]
    record.add(
        "mlp:eager",
        [plain | {"train_ms": 2.0}, plain | {"method": "other", "error": "no"}],
        ended=False,
    )
    assert json.loads((tmp_path / "new.json").read_text())["results"] == [
        plain | {"train_ms": 2.0}
    ]


def test_variants_of_targets_are_built_first_and_plain_networks_once() -> None:
    names = gpu.build_names(gpu.job_names("gpu"))
    assert (
        not [name for name in names if ":eager" in name]
        and "lab:graph:rank1-split" in names
    )
    assert (
        sum(name.startswith("wrn") and name.endswith(":plain") for name in names) == 1
    )
    assert names.index("wrn-rank1:compiled:rank-1 per member") < names.index(
        "mlp:compiled:bayesian-torch reparam"
    )


@pytest.mark.slow
def test_what_fails_is_said_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(net: nn.Module) -> nn.Module:
        raise RuntimeError("no such network")

    case = gpu_cases.CASES["mlp"]
    variants = {"plain": gpu_cases.Variant(), "broken": gpu_cases.Variant(broken)}
    monkeypatch.setitem(gpu.CASES, "mlp", gpu_cases.Case(case.works, variants))
    rows = {row["method"]: row for row in run("mlp:eager")}
    assert (
        rows["broken"]["error"] == "RuntimeError: no such network"
        and rows["plain"]["train_ms"] > 0
    )
    monkeypatch.setitem(gpu.CASES, "mlp", gpu_cases.Case({}, variants))
    assert run("mlp:eager")[0]["error"] == "KeyError: 'tiny'"


def test_building_ends_when_patience_does() -> None:
    def forever() -> None:
        while True:
            pass

    with pytest.raises(TimeoutError, match="not ready"), timing.alarm(0.05):
        forever()


@pytest.mark.slow
def test_a_cut_run_keeps_what_it_has_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "gpu.json"
    some = [
        "--sizes",
        "tiny",
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--workers",
        "0",
        "--out",
        str(out),
    ]
    gpu.main([*some, "--only", "scale-(draws|ranks)", "--limit-seconds", "0"])
    assert json.loads(out.read_text())["not_run"] == [
        f"scale-{name}:eager: no time was left" for name in ("draws", "ranks")
    ]
    gpu.main([*some, "--only", "scale-draws"])
    first = json.loads(out.read_text())["results"]
    ran: list[str] = []
    monkeypatch.setattr(gpu, "run_job", lambda name, args: ran.append(name) or [])
    gpu.main([*some, "--only", "scale-(draws|ranks)", "--resume", str(out)])
    assert ran == ["scale-ranks:eager"]
    assert json.loads(out.read_text())["results"] == first
    new = [first[0] | {"predict_ms": 7.0}]
    monkeypatch.setattr(
        gpu,
        "run_job",
        lambda name, args: ran.append(name) or (new if "draws" in name else []),
    )
    gpu.main(
        [
            *some,
            "--only",
            "scale-(draws|ranks)",
            "--resume",
            str(out),
            "--again",
            "draws",
        ]
    )
    assert ran[1:] == [
        "scale-ranks:eager",
        "scale-draws:eager",
    ]  # what was never measured comes first
    assert [
        row for row in json.loads(out.read_text())["results"] if "older" not in row
    ] == new
    assert "not measured since: scale-draws (eager: S=3)." in performance_page.page(
        json.loads(out.read_text())
    )
    gpu.main([*some, "--only", "scale-ranks", "--resume", str(out), "--again", "."])
    assert "not measured since: scale-draws (eager)." in performance_page.page(
        json.loads(out.read_text())
    )


@pytest.mark.slow
def test_jobs_run_in_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    some = [
        "--sizes",
        "tiny",
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--workers",
        "2",
        "--out",
        str(out),
    ]
    record = gpu.main([*some, "--only", "scale-draws"])
    assert record is not None and [row["method"] for row in record["results"]] == [
        "S=1",
        "S=3",
    ]
    assert json.loads(out.read_text()) == record


# --- the page


def test_every_target_is_a_number_that_is_measured() -> None:
    for target in performance_page.TARGETS:
        if target.case == "lab":
            assert set(target.methods) <= set(gpu.LAB) and target.mode == "graph"
            continue
        case = gpu_cases.CASES[target.case]
        assert target.mode in case.modes and "gpu" in case.works
        assert set(target.methods) <= set(case.variants)
        for rival in target.rivals:
            other, _, name = rival.rpartition("/")
            assert name in gpu_cases.CASES[other or target.case].variants
        assert target.number.split("_")[0] in (*case.kinds, "peak")


def made_up() -> dict[str, Any]:
    plain = {"train_ms": 2.0, "train_ratio": 1.0, "peak_mib": 100.0, "peak_ratio": 1.0}
    plain |= {
        "predict_ms": 1.0,
        "predict_ratio": 1.0,
        "train_profile": {"busy_ms": 1.9, "kernels": 30, "longest": []},
    }
    busy = {
        "busy_ms": 2.9,
        "kernels": 50,
        "longest": [["gemm", 4, 2.0], ["noise", 9, 0.9]],
    }
    idle = {"busy_ms": 1.0, "kernels": 400, "longest": []}
    example = {
        "train_ms": 3.0,
        "train_ratio": 1.5,
        "peak_mib": 110.0,
        "peak_ratio": 1.1,
        "train_profile": busy,
    }
    member = {
        "train_ms": 2.1,
        "train_ratio": 1.104,
        "peak_mib": 110.0,
        "peak_ratio": 1.1,
        "train_profile": busy,
    }
    slow = {
        "train_ms": 4.0,
        "train_ratio": 2.0,
        "peak_mib": 120.0,
        "peak_ratio": 1.2,
        "train_profile": idle,
    }
    rows = [
        ("compiled", "plain", plain), ("compiled", "rank-1 per example", example),
        ("compiled", "rank-1 per member", member), ("compiled", "bayesian-torch flipout", {"error": "TypeError: a|b"}),
        ("eager", "plain", plain), ("eager", "rank-1 per example", slow),
        ("eager", "bayesian-torch flipout", {"train_ms": 5.0, "train_ratio": 2.5}),
    ]  # fmt: skip
    results = [
        {"case": "mlp", "mode": m, "sizes": "MLP", "method": n} | row
        for m, n, row in rows
    ]
    results.append(
        {
            "case": "scale-draws",
            "mode": "eager",
            "sizes": "many",
            "method": "S=1",
            "predict_ms": 7.0,
        }
    )
    return {
        "machine": {"device": "chip", "cores": 2},
        "seconds": 9.0,
        "results": results,
        "not_run": ["vit:eager: no time was left"],
    }


def test_the_page_says_what_is_met_and_why_the_rest_is_not() -> None:
    text = performance_page.page(made_up())
    unknown = (
        len(performance_page.TARGETS) - 4
    )  # per member's step rounds to its goal; memory is below its own
    assert (
        f"{len(performance_page.TARGETS)} targets: 2 met, 2 missed, 0 unclear, {unknown} not measured"
        in text
    )
    assert (
        "| MLP 4 x 4096, rank-1 per member | step | 2.40 | 1.10 | 1.10 | - | met |  |"
        in text
    )
    assert (
        "rank-1 per example | step | 2.50 | 1.20 | 1.50 | - | **missed** | bayesian-torch flipout 2.50 eager |"
        in text
    )
    assert (
        "step: the GPU is busy for 2.90 of 3.00 ms with 50 kernels, plain 1.90 of 2.00 ms with 30: bound by kernels"
        in text
    )
    assert (
        "step, eager: the GPU is busy for 1.00 of 4.00 ms with 400 kernels" in text
        and "bound by Python" in text
    )
    assert (
        "| S=1 | 7.00 |" in text
        and "vit:eager: no time was left" in text
        and "TypeError: a/b" in text
    )
    assert (
        "| WRN-28-10, rank-1 per member | step | 1.24 | 1.06 | - | - | not measured |  |"
        in text
    )


def test_rows_on_a_cpu_are_those_of_a_record_of_its_own() -> None:
    row = {
        "case": "small",
        "mode": "eager",
        "sizes": "MLP",
        "method": "rank-1 per example",
    }
    here, there = (
        {"results": [row | {"train_ms": 1.0, "train_ratio": ratio}]}
        for ratio in (3.0, 1.9)
    )
    cpu = {
        "machine": {
            "device": "x86_64",
            "cores": 2,
            "threads": 1,
            "torch": "2.13",
            "python": "3.11",
        }
    } | there
    cpu["results"].append(row | {"case": "mlp", "train_ms": 1.0, "train_ratio": 7.7})
    text = performance_page.page(made_up() | here, cpu)
    assert (
        "MLP 64-256-256-10 on a CPU, rank-1 | step, eager | 8.50 | 2.00 | 1.90 | - | met |"
        in text
    )
    assert "x86_64, 2 cores, 1 threads" in text and "7.7" not in text


@pytest.mark.parametrize(
    ("peak", "shown"), [(120.0, True), (99.0, False), (-3.0, False)]
)
def test_peaks_of_memory_below_the_plain_ones_are_left_out(
    peak: float, shown: bool
) -> None:
    """They say that something else was given back, not what a step takes."""
    rows = [("K=2 plain", 100.0), ("K=2 rank-1", peak)]
    about = {"case": "scale-members", "mode": "eager", "sizes": "many", "train_ms": 1.0}
    text = performance_page.page(
        made_up() | {"results": [about | {"method": m, "peak_mib": p} for m, p in rows]}
    )
    assert (f"{peak:.2f}" in text, "peaks of memory are wrong" in text) == (
        shown,
        not shown,
    )


def test_the_page_says_how_far_ratios_spread_and_which_profiles_say_nothing() -> None:
    record = made_up()
    for row in record["results"]:
        if (row["mode"], row["method"]) == ("compiled", "rank-1 per example"):
            row |= {"train_spread": 0.4, "older": True}
            row["train_profile"] |= {"busy_ms": 2 * row["train_ms"]}
    text = performance_page.page(record)
    assert "| 1.50 ± 0.20 |" in text and "others used the GPU" in text
    assert (
        "Of an earlier version, and not measured since: mlp (compiled: rank-1 per example)."
        in text
    )


def test_a_step_as_a_cuda_graph_can_meet_a_compiled_target_and_no_eager_one() -> None:
    of = {
        t.mode: t
        for t in performance_page.TARGETS
        if t.workload == "GPT-2 small, frozen base"
    }
    rows = {
        ("gpt2", mode, "rank-1, frozen base"): {"train_ratio": r}
        for mode, r in (("compiled", 1.5), ("recorded", 0.9))
    }
    states = {mode: performance_page.state(target, rows) for mode, target in of.items()}
    assert states == {"compiled": "met", "eager": "not measured"}
    rows["gpt2", "recorded", "rank-1, frozen base"]["train_spread"] = (
        0.2  # from .80 to 1.00, where .95 is wanted
    )
    assert performance_page.state(of["compiled"], rows) == "unclear"
    assert performance_page.recorded(of["eager"], rows) is None


def test_the_best_of_several_methods_is_one_method() -> None:
    """Memory is that of the fastest, not the least of any."""
    target = next(
        t
        for t in performance_page.TARGETS
        if t.case == "dense" and t.number == "peak_ratio"
    )
    fast, lean = (
        {"train_ratio": 1.2, "peak_ratio": 1.9},
        {"train_ratio": 1.8, "peak_ratio": 1.1},
    )
    rows = {
        ("dense", "compiled", "2-tied flipout"): fast,
        ("dense", "compiled", "2-tied local"): lean,
    }
    assert performance_page.measured(target, rows) == (fast, 1.9)
    assert performance_page.state(target, rows) == "missed"


def test_a_record_of_another_machine_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps(made_up() | {"sizes": "tiny"}))
    with pytest.raises(SystemExit, match="its device is chip"):
        gpu.main(
            [
                "--sizes",
                "tiny",
                "--device",
                "cpu",
                "--only",
                "nothing",
                "--resume",
                str(tmp_path / "old.json"),
            ]
        )


def test_the_page_in_docs_is_made_of_the_records(tmp_path: Path) -> None:
    record, page = (
        ROOT / "lab" / "results" / "benchmarks" / "gpu_h200.json",
        tmp_path / "performance.md",
    )
    gpu.main(["--table", str(record), "--page", str(page)])
    assert page.read_text() == (ROOT / "docs" / "performance.md").read_text()
