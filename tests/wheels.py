"""Wheels built as an index would build them, and environments that hold little else.

`test_package.py` of the library and of the laboratory use it.
"""

import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, **options)


def build_wheel(project: Path, folder: Path) -> Path:
    """Build a wheel from the project's source distribution, which must hold all it takes."""
    build = (sys.executable, "-m", "hatchling", "build", "-d", folder)
    run(*build, "-t", "sdist", cwd=project, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    run(*build, "-t", "wheel", cwd=unpacked, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed_needs(*names: str) -> set[str]:
    """Installed distributions that these need, themselves included; extras bring nothing."""
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
        for requirement in map(Requirement, needed):
            if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def link_packages(home: Path, *names: str) -> None:
    """Link what these distributions need from here into the environment at `home`."""
    (packages,) = home.glob("lib/python*/site-packages")
    for name in installed_needs(*names):
        for root in _installed_roots(name):
            if not (packages / root.name).exists():
                (packages / root.name).symlink_to(root)


def _installed_roots(name: str) -> Iterator[Path]:
    """The files and folders that a distribution has in site-packages."""
    owner = distribution(name)
    tops = {file.parts[0] for file in owner.files or ()} - {"..", "__pycache__"}
    yield from (Path(str(owner.locate_file(top))) for top in tops)


def make_environment(home: Path, *names: str) -> Path:
    """An environment with what these distributions need and nothing else; its bin folder."""
    venv.create(home, symlinks=True)
    link_packages(home, *names)
    return home / "bin"


def install(python: Path, *wheels: Path, options: tuple[str, ...] = ()) -> None:
    """Install with dependencies and without an index, so that a missing one is an error."""
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    done = run(*pip, "--no-index", "--no-compile", *options, *wheels)
    assert done.returncode == 0, done.stderr


def install_alone(python: Path, *wheels: Path) -> None:
    """Install these wheels and nothing that they need."""
    install(python, *wheels, options=("--no-deps",))
