"""The laboratory's wheel, and the command `slimbayes` that comes with it."""

import os
import sys
import zipfile
from pathlib import Path

import pytest
from installed import check_command
from lab_configs import call
from packaging.requirements import Requirement
from slimbayes_lab.runs import folder as run_folder
from wheels import ROOT, build_wheel, install_alone, make_environment, run

LAB = ROOT / "lab"
CORE = ("torch", "numpy", "safetensors")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Those of the library and of the laboratory."""
    return (
        build_wheel(ROOT, tmp_path_factory.mktemp("library")),
        build_wheel(LAB, tmp_path_factory.mktemp("laboratory")),
    )


def required_by(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = archive.read(name).decode()
    lines = [
        line.partition(": ")[2]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist")
    ]
    return {Requirement(line).name for line in lines if "extra ==" not in line}


@pytest.mark.slow
def test_the_command_works_outside_of_the_checkout(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    """A config for a csv, the papers' configs, completion: in an environment with what both wheels need."""
    needed = required_by(wheels[1]) - {"slimbayes"}
    home = tmp_path / "environment"
    programs = make_environment(home, *CORE, *needed)
    install_alone(programs / "python", *wheels)
    check_command(programs, tmp_path)


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_experiments(
    wheels: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(wheels[1]) as archive:
        names = set(archive.namelist())
    source = LAB / "src"
    files = [file for file in (source / "slimbayes_lab").rglob("*") if file.is_file()]
    own = {str(file.relative_to(source)) for file in files if file.suffix != ".pyc"}
    experiments = {
        f"slimbayes_lab/{file.relative_to(LAB)}"
        for file in (LAB / "experiments").rglob("*.yaml")
    }
    assert own | experiments <= names
    assert required_by(wheels[1]) >= {"slimbayes", "typer", "pydantic"}


@pytest.mark.slow
def test_the_command_says_what_to_install_where_a_package_is_missing(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    home = tmp_path / "environment"
    programs = make_environment(home, *CORE)
    install_alone(programs / "python", *wheels)
    commands = [
        ["slimbayes"],
        ["slimbayes", "fit", "a.yaml"],
        ["python", "-m", "slimbayes_lab"],
    ]
    for command in commands:
        done = run(programs / command[0], *command[1:], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (3, "")
        needed = 'The slimbayes command needs typer: pip install "slimbayes-lab"\n'
        assert done.stderr == needed


@pytest.mark.slow
def test_the_module_is_the_command() -> None:
    done = run(sys.executable, "-m", "slimbayes_lab", "--help")
    assert done.returncode == 0 and "reproduce" in done.stdout


@pytest.mark.slow
def test_completion_of_the_module_is_for_the_command_not_for_python() -> None:
    script = run(
        "bash", "-c", f"{sys.executable} -m slimbayes_lab --show-completion; exit $?"
    ).stdout
    assert "complete -o default -F _slimbayes_completion slimbayes" in script
    assert "python" not in script
    words = {
        "_SLIMBAYES_COMPLETE": "complete_bash",
        "COMP_WORDS": "slimbayes re",
        "COMP_CWORD": "1",
    }
    done = run(sys.executable, "-m", "slimbayes_lab", env={**os.environ, **words})
    assert done.stdout.split() == ["report", "reproduce"]


def test_a_command_that_lacks_a_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.delitem(sys.modules, "slimbayes_lab.report.page", raising=False)
    done = call("report", str(tmp_path))
    assert done.exit_code == 3 and "vl_convert" in done.output
    assert 'pip install "slimbayes-lab"' in done.output


@pytest.mark.parametrize("program", ["bin/slimbayes", "slimbayes_lab/__main__.py"])
def test_a_record_names_the_command_as_one_would_type_it(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "fit", "a b.yaml"])
    assert run_folder.command() == "slimbayes fit 'a b.yaml'"
