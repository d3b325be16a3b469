"""The library's wheel: what it holds, what it needs, and that every method works with that alone."""

import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from wheels import ROOT, build_wheel, install, make_environment, run

from slimbayes.posteriors import METHODS

CORE = ("torch", "numpy", "safetensors")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.mark.slow
def test_every_method_works_in_the_smallest_install(
    wheel: Path, tmp_path: Path
) -> None:
    programs = make_environment(tmp_path / "smallest", *CORE)
    install(programs / "python", wheel)
    packages = next((tmp_path / "smallest").glob("lib/python*/site-packages"))
    absent = ("slimbayes_lab", "pydantic", "yaml", "scipy", "rich", "pip")
    assert not [name for name in absent if (packages / name).exists()]
    done = run(
        programs / "python", "-I", ROOT / "tests" / "smallest_install.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(METHODS)


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata_name,) = (name for name in names if name.endswith("METADATA"))
        metadata = archive.read(metadata_name).decode()
    source = ROOT / "src"
    files = [file for file in (source / "slimbayes").rglob("*") if file.is_file()]
    own = {str(file.relative_to(source)) for file in files if file.suffix != ".pyc"}
    assert own <= names and "slimbayes/py.typed" in names
    others = names - own
    assert all(name.split("/")[0].endswith(".dist-info") for name in others)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in others)
    lines = [
        line.partition(": ")[2]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist")
    ]
    needed = {Requirement(line).name for line in lines if "extra ==" not in line}
    assert needed == set(CORE)
    assert "License-Expression: Apache-2.0" in metadata
