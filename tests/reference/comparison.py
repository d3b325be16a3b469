"""Reading the reference and comparing with it."""

from functools import cache
from pathlib import Path

import torch
from reference.cases import Case
from reference.places import Tensors
from safetensors import safe_open
from safetensors.torch import load_file

FILE = Path(__file__).with_name("reference.safetensors")
TOLERANCE = 1e-6  # relative and absolute
RESULTS = ("outputs", "kl", "loss", "draws", "gradients", "buffers after")
BY_KL = ("kl", "loss", "gradients")  # what follows from the KL


@cache
def reference() -> dict[str, Tensors]:
    """All tensors of the file, by case and name."""
    found: dict[str, Tensors] = {}
    for key, value in load_file(FILE).items():
        case, _, name = key.partition("|")
        found.setdefault(case, {})[name] = value
    return found


@cache
def metadata() -> dict[str, str]:
    with safe_open(FILE, "pt") as file:
        return file.metadata()


def kind_of(name: str) -> str:
    return name.partition("/")[0]


def given(case: Case) -> Tensors:
    """What a case is given: parameters, statistics, noise, inputs and its loss."""
    every = reference()[case.name].items()
    return {name: value for name, value in every if kind_of(name) not in RESULTS}


def expected(case: Case) -> Tensors:
    """What must come out of it."""
    every = reference()[case.name].items()
    return {name: value for name, value in every if kind_of(name) in RESULTS}


def assert_same(found: Tensors, wanted: Tensors, case: Case) -> None:
    """Equal names, shapes and numbers."""
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        by_kl = kind_of(name) in BY_KL
        tolerance = case.tolerance if by_kl else TOLERANCE
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{case.name}, {name}: {text}",
        )
