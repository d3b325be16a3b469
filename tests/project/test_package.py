"""What is handed out: the wheel, what it needs, and what it says where that is all there is."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from installed import check_command
from lab_configs import call
from packaging.requirements import Requirement

from slimbayes.lab.runs import folder as run_folder
from slimbayes.posteriors import METHODS

ROOT = Path(__file__).parents[2]
CORE = ("torch", "numpy", "safetensors")
LAB = ("lab", "report", "data", "metrics")  # extras, those that they name included


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )  # type: ignore[call-overload]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as an index would: from the source distribution, which must hold all it takes."""
    folder = tmp_path_factory.mktemp("dist")
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "sdist",
        "-d",
        folder,
        cwd=ROOT,
        check=True,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        folder,
        cwd=unpacked,
        check=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def closure(names: tuple[str, ...]) -> set[str]:
    """Installed distributions that these need, themselves included; extras bring nothing here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        waiting += [
            r.name
            for r in map(Requirement, needed)
            if not r.marker or r.marker.evaluate({"extra": ""})
        ]
    return found


def roots(name: str) -> Iterator[Path]:
    """The files and folders that a distribution has in site-packages."""
    owner = distribution(name)
    tops = {file.parts[0] for file in owner.files or ()} - {"..", "__pycache__"}
    yield from (Path(str(owner.locate_file(top))) for top in tops)


@pytest.fixture(scope="session")
def smallest(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and, of what is installed here, the core's needs alone."""
    home = tmp_path_factory.mktemp("smallest")
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    for root in {root for name in closure(CORE) for root in roots(name)}:
        (packages / root.name).symlink_to(root)
    python = home / "bin" / "python"
    # With its dependencies and without an index: one that is not of the core's would not be found.
    done = run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-index",
        "--no-compile",
        wheel,
    )
    assert done.returncode == 0, done.stderr
    assert not [
        name
        for name in ("pydantic", "yaml", "scipy", "rich", "pip")
        if (packages / name).exists()
    ]
    return home / "bin"


@pytest.mark.slow
def test_every_method_works_in_the_smallest_install(
    smallest: Path, tmp_path: Path
) -> None:
    done = run(
        smallest / "python", "-I", ROOT / "tests" / "smallest_install.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(METHODS)


@pytest.mark.slow
def test_the_command_says_there_what_to_install(smallest: Path, tmp_path: Path) -> None:
    for command in (
        ["slimbayes"],
        ["slimbayes", "fit", "a.yaml"],
        ["python", "-m", "slimbayes"],
    ):
        done = run(smallest / command[0], *command[1:], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (3, "")
        assert (
            done.stderr
            == 'The slimbayes command needs typer: pip install "slimbayes[lab,report]"\n'
        )


@pytest.mark.slow
def test_the_command_works_outside_of_the_checkout(
    smallest: Path, tmp_path: Path
) -> None:
    """With what the lab needs beside the core's: a config for a csv, those of the papers, completion."""
    (packages,) = smallest.parent.glob("lib/python*/site-packages")
    needed = [Requirement(line) for line in distribution("slimbayes").requires or []]
    lab = {
        r.name
        for r in needed
        if r.marker and any(r.marker.evaluate({"extra": extra}) for extra in LAB)
    }
    for root in {
        root for name in closure(tuple(lab - {"slimbayes"})) for root in roots(name)
    }:
        if not (packages / root.name).exists():
            (packages / root.name).symlink_to(root)
    check_command(smallest, tmp_path)


@pytest.mark.slow
def test_the_module_is_the_command() -> None:
    done = run(sys.executable, "-m", "slimbayes", "--help")
    assert done.returncode == 0 and "reproduce" in done.stdout


@pytest.mark.slow
def test_completion_of_the_module_is_for_the_command_not_for_python() -> None:
    script = run(
        "bash", "-c", f"{sys.executable} -m slimbayes --show-completion; exit $?"
    ).stdout
    assert (
        "complete -o default -F _slimbayes_completion slimbayes" in script
        and "python" not in script
    )
    words = {
        "_SLIMBAYES_COMPLETE": "complete_bash",
        "COMP_WORDS": "slimbayes re",
        "COMP_CWORD": "1",
    }
    done = run(sys.executable, "-m", "slimbayes", env={**os.environ, **words})
    assert done.stdout.split() == ["report", "reproduce"]


def test_a_command_that_lacks_a_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.delitem(sys.modules, "slimbayes.report.page", raising=False)
    done = call("report", str(tmp_path))
    assert (
        done.exit_code == 3
        and "vl_convert" in done.output
        and 'pip install "slimbayes[lab,report]"' in done.output
    )


@pytest.mark.parametrize("program", ["bin/slimbayes", "slimbayes/__main__.py"])
def test_a_record_names_the_command_as_one_would_type_it(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "fit", "a b.yaml"])
    assert run_folder.command() == "slimbayes fit 'a b.yaml'"


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(
            next(name for name in names if name.endswith("METADATA"))
        ).decode()
    source = ROOT / "src"
    own = {
        str(file.relative_to(source))
        for file in (source / "slimbayes").rglob("*")
        if file.is_file()
    }
    own = {name for name in own if "__pycache__" not in name}
    given = {
        f"slimbayes/{f.relative_to(ROOT)}"
        for f in (ROOT / "experiments").rglob("*.yaml")
    }
    assert own | given <= names and "slimbayes/py.typed" in names
    others = {
        name for name in names - own if not name.startswith("slimbayes/experiments/")
    }
    assert all(name.split("/")[0].endswith(".dist-info") for name in others)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in others)
    needed = [
        line.partition(": ")[2]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist")
    ]
    assert {Requirement(line).name for line in needed if "extra ==" not in line} == set(
        CORE
    )
    assert "License-Expression: Apache-2.0" in metadata
