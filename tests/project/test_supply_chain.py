"""The lock, the licences and the bill of materials: the checks see what they are there to see."""

import importlib.util
import re
import sys
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"


@pytest.fixture(scope="module")
def chain() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "supply_chain", ROOT / "tools" / "supply_chain.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["supply_chain"] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_this_lock_does_not_drift(chain: ModuleType) -> None:
    lock = chain.read_lock(chain.LOCK.read_text())
    assert not chain.drift(chain.PROJECTS, lock, TORCH)
    assert f"TORCH = {TORCH}\n" in (ROOT / "Makefile").read_text()
    assert not re.search(r"https?:|file:|index-url|find-links", chain.LOCK.read_text())


@pytest.mark.parametrize(
    ("extra", "line", "found"),
    [
        ("dev", "numpy>=99", "numpy is locked at"),
        ("sklearn", "Left.Pad", "left-pad is not locked"),
        (
            "lightning",
            "pytorch-lightning>=2.6",
            "pytorch-lightning 2.6.2 is malware, and pyproject.toml allows it",
        ),
    ],
)
def test_a_drift_of_the_project_is_seen(
    chain: ModuleType, extra: str, line: str, found: str
) -> None:
    projects = deepcopy(chain.PROJECTS)
    projects["slimbayes"]["project"]["optional-dependencies"][extra].append(line)
    wrong = chain.drift(projects, chain.read_lock(chain.LOCK.read_text()), TORCH)
    assert any(message.startswith(found) for message in wrong)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            r"^rich==\S+",
            "rich==1.0",
            "rich is locked at 1.0, but pyproject.toml asks for rich>=13",
        ),
        (
            r"^pytorch-lightning==\S+",
            "pytorch-lightning==2.6.3",
            "pytorch-lightning 2.6.3 is malware, and it is locked",
        ),
        (r"^numpy==(\S+)", r"numpy==\1\nx==1 ", "numpy .* has no hash"),
        (r"^PyYAML==\S+|^pyyaml==\S+", "x==1", "pyyaml is not locked"),
    ],
)
def test_a_drift_of_the_lock_is_seen(
    chain: ModuleType, old: str, new: str, found: str
) -> None:
    text = re.sub(old, new, chain.LOCK.read_text(), flags=re.MULTILINE)
    assert any(
        re.match(found, message)
        for message in chain.drift(chain.PROJECTS, chain.read_lock(text), TORCH)
    )


def test_another_torch_is_seen(chain: ModuleType) -> None:
    lock = chain.read_lock(chain.LOCK.read_text())
    assert any(
        "torch is locked at 2.1.0" in message
        for message in chain.drift(chain.PROJECTS, lock, "torch==2.1.0")
    )


def test_what_is_installed_is_what_is_locked(
    chain: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = chain.closure(chain.asked_for(chain.PROJECTS, "slimbayes"))
    lock = {
        name: chain.Pin(version(name), ("0",))
        for name in needed
        if not chain.OF_TORCH.fullmatch(name)
    }
    library = chain.PROJECTS["slimbayes"]["project"]
    bare = library | {"optional-dependencies": {"dev": []}}
    projects = {"slimbayes": {"project": bare}}
    assert not chain.installed(projects, lock)
    assert chain.installed(projects, lock | {"numpy": chain.Pin("0.1", ("0",))}) == [
        f"numpy is locked at 0.1, but {version('numpy')} is installed"
    ]
    assert "networkx is needed and not locked: make lock" in chain.installed(
        projects, {name: pin for name, pin in lock.items() if name != "networkx"}
    )
    monkeypatch.setattr(chain, "ALLOWED", chain.ALLOWED - {"BSD-3-Clause"})
    assert any(
        message.startswith("numpy has the licence")
        for message in chain.installed(projects, lock)
    )


@pytest.mark.slow
def test_the_bill_of_materials_names_what_the_wheel_needs(
    chain: ModuleType, tmp_path: Path
) -> None:
    wheel = tmp_path / "slimbayes-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    bill = chain.sbom(chain.PROJECTS, chain.read_lock(chain.LOCK.read_text()), wheel)
    scopes = {part["name"]: part["scope"] for part in bill["components"]}
    assert {scopes[name] for name in ("torch", "numpy", "safetensors", "networkx")} == {
        "required"
    }
    optional = ("torchmetrics", "scikit-learn", "onnx")
    assert {scopes[name] for name in optional} == {"optional"}
    assert "pytest" not in scopes
    refs = {part["bom-ref"] for part in bill["components"]}
    assert {ref for line in bill["dependencies"] for ref in line["dependsOn"]} <= refs
    numpy = next(part for part in bill["components"] if part["name"] == "numpy")
    assert (
        numpy["purl"] == f"pkg:pypi/numpy@{version('numpy')}"
        and "externalReferences" in numpy
    )
    assert len(bill["metadata"]["component"]["hashes"][0]["content"]) == 64
