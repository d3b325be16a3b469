"""The library makes of the reference's cases what it made when the file was written.

`reference.safetensors` holds, for the methods, priors and options on small networks in
float64, fixed parameters, noise and inputs, and what came out: draws, outputs, KL, loss,
gradients and batch statistics. `paper.py` computes the same from the papers' equations,
without the library, so that the file is known to be right whatever wrote it.
"""

from typing import Any

import pytest
from reference import adapter, paper
from reference.cases import CASES, Case
from reference.comparison import assert_same, expected, given, metadata, reference

QUICK = ("rank1-normal", "k-tied-2", "emp")


def case_parameters() -> list[Any]:
    """All cases; each takes little time, but all together take seconds."""
    return [
        pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, case in CASES.items()
    ]


every_case = pytest.mark.parametrize("case", case_parameters())


@every_case
def test_the_library_gives_what_the_reference_holds(case: Case) -> None:
    record, wanted = given(case), expected(case)
    found = adapter.compute(case, record)
    one_by_one = found.pop(adapter.ONE_BY_ONE, wanted["outputs"])
    assert_same(found, wanted, case)
    assert_same({"outputs": one_by_one}, {"outputs": wanted["outputs"]}, case)


@every_case
def test_the_reference_is_what_the_papers_equations_give(case: Case) -> None:
    assert_same(paper.compute(case, given(case)), expected(case), case)


def test_only_cases_that_were_to_go_are_gone() -> None:
    assert set(CASES) <= set(reference())
    assert set(reference()) - set(CASES) <= set(metadata()["gone"].split())


def test_no_gradient_of_a_case_is_zero() -> None:
    """Where all are zero no fault would show."""
    zero = [
        f"{case.name}: {name}"
        for case in CASES.values()
        for name, value in expected(case).items()
        if name.startswith("gradients/") and value.numel() and not value.any()
    ]
    assert not zero
