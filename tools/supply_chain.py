"""What is installed, from where, and under which terms: checks of the lock, and the bill of materials.

    python tools/supply_chain.py check torch==2.13.0         the lock against both pyproject.toml and what is installed
    python tools/supply_chain.py sbom dist/slimbayes-*.whl   a CycloneDX file beside the wheel

`make lock` writes requirements.lock. torch stands apart from it: which build is right, and so its hash and the CUDA
libraries it brings, depends on the machine, so the Makefile pins its version alone.
"""

import hashlib
import json
import re
import sys
import tomllib
import uuid
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FILES = (ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml")
PROJECTS = {
    project["project"]["name"]: project
    for project in (tomllib.loads(file.read_text()) for file in FILES)
}
LOCK = ROOT / "requirements.lock"
OF_TORCH = re.compile("torch|triton|nvidia-.*|cuda-.*")
# Releases that somebody else uploaded: they stole credentials when imported.
DENIED = {"lightning": {"2.6.2", "2.6.3"}, "pytorch-lightning": {"2.6.2", "2.6.3"}}
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "LLVM-exception",
    "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
# Names that packages of before SPDX expressions use.
SPDX = {
    "Apache Software License": "Apache-2.0", "Apache 2.0 License": "Apache-2.0", "MIT License": "MIT",
    "BSD License": "BSD-3-Clause", "3-Clause BSD License": "BSD-3-Clause", "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0", "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}  # fmt: skip


@dataclass(frozen=True)
class Pin:
    """A line of the lock."""

    version: str
    hashes: tuple[str, ...]


def read_lock(text: str) -> dict[str, Pin]:
    """
    >>> read_lock("a-b==1.0 --hash=sha256:00 --hash=sha256:01")
    {'a-b': Pin(version='1.0', hashes=('00', '01'))}
    """
    lines = re.sub(r"\\\n|#.*", " ", text).splitlines()
    pins = (
        re.fullmatch(r"([\w.-]+)==(\S+)(.*)", line.strip())
        for line in lines
        if line.strip()
    )
    return {
        canonicalize_name(pin[1]): Pin(
            pin[2], tuple(re.findall(r"--hash=sha256:(\w+)", pin[3]))
        )
        for pin in pins
        if pin
    }


Projects = dict[str, dict[str, Any]]


def asked_for(projects: Projects, name: str, *extras: str) -> list[Requirement]:
    """What a distribution of ours asks for with these extras.

    Requirements on our own distributions are replaced by what those ask for.
    """
    project = projects[name]["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    found: list[Requirement] = []
    for requirement in map(Requirement, lines):
        if requirement.name in projects:
            if requirement.name != name or requirement.extras:
                found += asked_for(projects, requirement.name, *requirement.extras)
        else:
            found.append(requirement)
    return found


def for_developers(projects: Projects) -> list[Requirement]:
    """What the environment of the tests asks for: every distribution with its extra `dev`."""
    return [line for name in projects for line in asked_for(projects, name, "dev")]


def closure(requirements: list[Requirement]) -> dict[str, set[str]]:
    """Everything installed that these need, each with what it needs itself."""
    needs: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [
        (canonicalize_name(r.name), extra)
        for r in requirements
        for extra in ("", *r.extras)
    ]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        needs.setdefault(name, set())
        for requirement in map(Requirement, distribution(name).requires or []):
            if requirement.marker is None or requirement.marker.evaluate(
                {"extra": extra}
            ):
                other = canonicalize_name(requirement.name)
                needs[name].add(other)
                waiting += [(other, more) for more in ("", *requirement.extras)]
    return needs


def licence(name: str) -> str:
    """The SPDX expression of an installed package, or what its metadata says instead.

    >>> licence("numpy").split()[0]
    'BSD-3-Clause'
    """
    metadata = distribution(name).metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier", [])
        if "License ::" in line
    ]
    named = [SPDX[line] for line in classifiers if line in SPDX]
    own = next(iter((metadata.get("License") or "").splitlines()), "")
    return " AND ".join(named) or SPDX.get(own, own) or "none"


def allowed(expression: str) -> bool:
    """Every licence of an expression is on the list.

    >>> allowed("(MIT OR Apache-2.0 WITH LLVM-exception) AND ISC"), allowed("MIT AND GPL-3.0-only"), allowed("none")
    (True, False, False)
    """
    return set(re.findall(r"[^\s()]+", expression)) - {"AND", "OR", "WITH"} <= ALLOWED


def drift(projects: Projects, lock: dict[str, Pin], torch: str) -> list[str]:
    """Where the lock and pyproject.toml disagree; empty if nowhere."""
    pin = Requirement(torch)
    locked = lock | {
        "torch": Pin(str(pin.specifier).removeprefix("=="), ("of the machine's build",))
    }
    own = for_developers(projects)
    for project in projects.values():
        own += map(Requirement, project["build-system"]["requires"])
    wrong = [
        f"{name} {pin.version} has no hash"
        for name, pin in locked.items()
        if not pin.hashes
    ]
    for requirement in own:
        name = canonicalize_name(requirement.name)
        if name not in locked:
            wrong.append(f"{name} is not locked: make lock")
        elif not requirement.specifier.contains(locked[name].version):
            wrong.append(
                f"{name} is locked at {locked[name].version}, but pyproject.toml asks for {requirement}"
            )
    for name, versions in DENIED.items():
        admitted = {
            v
            for r in own
            if canonicalize_name(r.name) == name
            for v in versions
            if r.specifier.contains(v)
        }
        pinned = {locked[name].version} & versions if name in locked else set()
        wrong += [
            f"{name} {version} is malware, and pyproject.toml allows it"
            for version in sorted(admitted)
        ]
        wrong += [
            f"{name} {version} is malware, and it is locked"
            for version in sorted(pinned)
        ]
    return wrong


def installed(projects: Projects, lock: dict[str, Pin]) -> list[str]:
    """Where what is installed here differs from the lock, or has a licence that is not on the list."""
    try:
        needs = closure(for_developers(projects))
    except PackageNotFoundError as error:
        return [f"{error.name} is needed and not installed: make lock"]
    wrong = []
    for name in sorted(needs):
        if OF_TORCH.fullmatch(name) and name not in lock:
            continue  # its CUDA libraries have terms of their own
        version = distribution(name).version
        if name not in lock:
            wrong.append(f"{name} is needed and not locked: make lock")
        elif lock[name].version != version:
            wrong.append(
                f"{name} is locked at {lock[name].version}, but {version} is installed"
            )
        if not allowed(licence(name)):
            wrong.append(
                f"{name} has the licence {licence(name)[:80]!r}, which tools/supply_chain.py does not list"
            )
    return wrong


def sbom(projects: Projects, lock: dict[str, Pin], wheel: Path) -> dict[str, Any]:
    """CycloneDX 1.6: the wheel, what it needs, and what its extras add, at the versions it was tested with."""
    apart = ("dev", "docs", "ray", "benchmarks")  # for developers, or not locked
    name, version = wheel.name.split("-")[:2]
    project = projects[name.replace("_", "-")]
    own_name = project["project"]["name"]
    extras = [
        extra
        for extra in project["project"]["optional-dependencies"]
        if extra not in apart
    ]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    direct = asked_for(projects, own_name, *extras)
    core = closure(asked_for(projects, own_name))
    needs = closure(direct)

    def purl(package: str) -> str:
        return f"pkg:pypi/{package}@{quote(distribution(package).version)}"

    def component(package: str) -> dict[str, Any]:
        files = (
            [{"alg": "SHA-256", "content": one} for one in lock[package].hashes]
            if package in lock
            else []
        )
        terms = licence(package)
        links = [
            {
                "type": "distribution",
                "url": f"https://pypi.org/project/{package}/",
                "hashes": files,
            }
        ]
        return {
            "type": "library", "bom-ref": purl(package), "name": package, "version": distribution(package).version,
            "purl": purl(package), "scope": "required" if package in core else "optional",
            "licenses": [{"expression": terms} if allowed(terms) else {"license": {"name": terms[:80]}}],
        } | ({"externalReferences": links} if files else {})  # fmt: skip

    own = f"pkg:pypi/{name}@{version}"
    graph = [
        {"ref": purl(package), "dependsOn": sorted(map(purl, needs[package]))}
        for package in sorted(needs)
    ]
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"{own}#{digest}").urn,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": own, "name": name, "version": version, "purl": own,
                "hashes": [{"alg": "SHA-256", "content": digest}],
                "licenses": [{"license": {"id": project["project"]["license"]}}],
            },
        },
        "components": [component(package) for package in sorted(needs)],
        "dependencies": [{"ref": own, "dependsOn": sorted({purl(canonicalize_name(r.name)) for r in direct})}, *graph],
    }  # fmt: skip


def main(task: str, argument: str) -> int:
    """Run one of the two, and say what is wrong."""
    lock = read_lock(LOCK.read_text())
    if task == "check":
        wrong = drift(PROJECTS, lock, argument) + installed(PROJECTS, lock)
        print(
            "\n".join(wrong)
            or f"{len(lock)} locked packages agree with pyproject.toml; their licences are listed"
        )
        return int(bool(wrong))
    wheel = Path(argument)
    wheel.with_suffix(".cdx.json").write_text(
        json.dumps(sbom(PROJECTS, lock, wheel), indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
