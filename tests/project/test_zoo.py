"""benchmarks/zoo.py on two small architectures, and that its checks find faults planted for them."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slimbayes as sb

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import zoo
import zoo_checks
import zoo_models
import zoo_sequences

HOLD = dict.fromkeys(zoo_checks.CHECKS, "holds")


@pytest.mark.slow
def test_two_architectures_under_two_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, docs = tmp_path / "zoo.json", tmp_path / "zoo.md"
    zoo.main(
        [
            "--only",
            "transformers/(bert|vit)$",
            "--methods",
            "batchensemble,ensemble",
            "--out",
            str(out),
        ]
    )
    found = json.loads(out.read_text())
    assert [(p["architecture"], p["method"]) for p in found["pairs"]] == [
        (f"transformers/{name}", method)
        for name in ("bert", "vit")
        for method in ("batchensemble", "ensemble")
    ]
    assert all(p["checks"] == HOLD and p["holds"] for p in found["pairs"]), [
        p["errors"] for p in found["pairs"]
    ]
    assert (
        found["versions"]["torch"] and not found["not_run"] and not found["not_built"]
    )
    assert "4 of 4 pairs hold" in capsys.readouterr().out
    zoo.main(["--table", str(out), "--docs", str(docs)])
    assert (
        "**4 of 4 pairs hold**" in docs.read_text()
        and "| transformers | 2 of 2 | 2 of 2 | 4 of 4 |" in docs.read_text()
    )


def test_what_there_is_no_time_for_is_listed() -> None:
    found = zoo.run_all(
        ["transformers/bert"],
        ["ktied", "emp"],
        "cpu",
        deadline=time.time() - 1,
        workers=1,
    )
    assert (
        found["not_run"]
        == [["transformers/bert", "ktied"], ["transformers/bert", "emp"]]
        and not found["pairs"]
    )
    told = zoo.failures(found)
    assert "2 pairs not run" in told and "0 of 0 pairs hold" in told


def test_runs_are_joined_and_later_ones_count(tmp_path: Path) -> None:
    def run(name: str, holds: bool, device: str) -> dict[str, Any]:
        states = HOLD | ({} if holds else {"fold": "fails"})
        pair = {
            "architecture": f"{name}/net",
            "package": name,
            "method": "ktied",
            "checks": states,
            "holds": holds,
        }
        made_by = {"torch": "2.0", name: "1.0", "other": "not installed"}
        rest = {"errors": {"fold": "off"}, "draw_by_draw": False}
        return {
            "versions": made_by,
            "device": device,
            "pairs": [pair | rest],
            "not_run": [],
            "not_built": {},
        }

    runs = [run("a", False, "cuda"), run("b", True, "cpu"), run("a", True, "cpu")]
    for i, one in enumerate(runs):
        (tmp_path / f"{i}.json").write_text(json.dumps(one))
    zoo.main(
        [
            "--table",
            *(str(tmp_path / f"{i}.json") for i in range(3)),
            "--docs",
            str(tmp_path / "zoo.md"),
        ]
    )
    told = (tmp_path / "zoo.md").read_text()
    assert (
        "**2 of 2 pairs hold** on 2 architectures" in told
        and "Nothing." in told
        and "not installed" not in told
    )
    assert (
        "1 on cpu with torch 2.0, b 1.0" in told and "| b | 1 of 1 | 1 of 1 |" in told
    )


def test_every_package_has_many_architectures() -> None:
    sizes = [
        len(make())
        for make in (
            zoo_models._transformers,
            zoo_models._timm,
            zoo_models._torchvision,
        )
    ]
    assert sum(sizes) >= 60 and min(sizes) >= 20
    assert sum(len(entries()) for entries in zoo_models.MAKERS.values()) >= 30


def test_libraries_that_are_not_installed_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry: zoo_sequences.Entry = ("net", Net, lambda: {"": torch.randn(3, 4)})
    monkeypatch.setattr(
        zoo_sequences, "MAKERS", {"torch": [entry], "no_such_library": [entry]}
    )
    names = [one.name for one in zoo_sequences.architectures()]
    assert names == [*(one.name for one in zoo_models.architectures()), "torch/net"]
    assert len({*zoo_sequences.PACKAGES}) == len(zoo_sequences.PACKAGES)


# --- planted faults ---


class Net(nn.Module):
    """Two layers; with `lost`, the second is left out once it is no plain nn.Linear any more."""

    def __init__(self, lost: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.lost = nn.Linear(4, 8), nn.Linear(8, 3), lost

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        return (
            h[:, :3]
            if self.lost and type(self.second) is not nn.Linear
            else self.second(h)
        )


def checked(method: zoo_checks.Method, lost: bool = False) -> dict[str, Any]:
    architecture = zoo_models.Architecture(
        "mine/net", lambda: Net(lost), lambda: {"": torch.randn(3, 4)}
    )
    return zoo_checks.check_pair(
        zoo_checks.build_plain(architecture, torch.device("cpu")), method
    )


FACTORS = zoo_checks.METHODS["batchensemble"]


def test_a_sound_pair_holds() -> None:
    found = checked(FACTORS)
    assert found["checks"] == HOLD, found["errors"]


def test_a_start_that_is_not_neutral_and_draws_that_are_all_alike_are_found() -> None:
    found = checked(replace(FACTORS, neutral=FACTORS.usual, usual=FACTORS.neutral))
    assert {name for name, state in found["checks"].items() if state == "fails"} == {
        "zero noise",
        "draws",
    }


def test_a_posterior_that_never_runs_is_found() -> None:
    found = checked(FACTORS, lost=True)
    assert (
        found["checks"]["gradients"] == "fails"
        and "second" in found["errors"]["gradients"]
    )


def test_a_conversion_that_cannot_be_undone_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sb, "debayesianize", lambda model: model)
    found = checked(FACTORS)
    assert (
        found["checks"] == HOLD | {"undo": "fails"}
        and "names differ" in found["errors"]["undo"]
    )


def test_a_model_that_mixes_rows_and_is_folded_all_the_same_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = sb.sample

    def shuffled(
        net: nn.Module, *args: Any, parallel: bool = True, **kwargs: Any
    ) -> Any:
        out = real(net, *args, parallel=parallel, **kwargs)
        return out.flip(1) if parallel else out

    monkeypatch.setattr(sb, "sample", shuffled)
    found = checked(FACTORS)
    assert found["checks"]["fold"] == "fails" and "off by" in found["errors"]["fold"]


def test_an_error_in_one_check_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(net: nn.Module) -> None:
        raise RuntimeError("no table")

    monkeypatch.setattr(sb, "summary", broken)
    found = checked(FACTORS)
    assert found["checks"] == HOLD | {"summary": "fails"} and found["errors"] == {
        "summary": "RuntimeError: no table"
    }


def test_a_refused_conversion_leaves_the_rest_unjudged() -> None:
    found = checked(
        zoo_checks.METHODS["emp"].__class__(
            lambda m: sb.ModelPatch(patch="norm"), lambda m: sb.ModelPatch(patch="norm")
        )
    )
    assert found["checks"] == dict.fromkeys(HOLD, "not run") | {"convert": "fails"}
    assert "found none" in found["errors"]["convert"]


def test_the_docs_say_how_many_architectures_and_libraries_the_page_has() -> None:
    root = Path(__file__).parents[2]
    page, why = (
        (root / "docs" / "zoo.md").read_text(),
        (root / "docs" / "why.md").read_text(),
    )
    counts = page.split("## How many pairs hold")[1].split("\n## ")[0]
    libraries = re.findall(r"^\| ([a-z]\w*) \|", counts, re.MULTILINE)
    count = re.findall(r"pairs hold\*\* on (\d+) architectures", page)
    assert (
        f"on {count[0]} architectures of {len({*libraries} - {'package', 'all'})} libraries"
        in why
    )
