"""Fewer cases than the product: covering arrays, such as over methods, layers and properties.

A bug of a method, a layer or a property shows in any case that has it; one that needs two of them in any case that has
both. So every pair that occurs in the product occurs in the array; what needs three at once is named by hand (`kept`).
"""

import itertools
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

Pair = tuple[str, str]  # (method, layer)
Case = tuple[str, str, str]  # (method, layer, property)


def pairs_in(case: Case, alike: Mapping[str, str] = {}) -> set[tuple[str, str, str]]:
    """The three pairs of a case, each marked by what it is a pair of; to one another, `alike` methods and layers are
    one."""
    method, layer, name = case
    both = (alike.get(method, method), alike.get(layer, layer))
    return {
        ("method, layer", *both),
        ("method, property", method, name),
        ("layer, property", layer, name),
    }


def covering(
    grid: dict[str, list[Pair]],
    kept: Callable[[str, Pair], bool],
    alike: Mapping[str, str] = {},
) -> dict[str, list[Pair]]:
    """The cases of a grid, {property: (method, layer) pairs}, to run: those `kept`, then greedily those with new pairs.

    >>> full = {"adds": [(m, n) for m in "ab" for n in "xy"], "saves": [(m, n) for m in "ab" for n in "xy"]}
    >>> sum(map(len, covering(full, kept=lambda name, pair: False).values()))
    4
    """
    cases: list[Case] = []
    for (
        name,
        pairs,
    ) in (
        grid.items()
    ):  # each in an order of its own, the same in every run, so that properties differ
        cases += [
            (*pair, name) for pair in random.Random(name).sample(pairs, len(pairs))
        ]
    chosen = {case for case in cases if kept(case[2], case[:2])}
    pairs = {case: pairs_in(case, alike) for case in cases}
    missing = set().union(*pairs.values()).difference(*(pairs[case] for case in chosen))
    for new in (3, 2, 1):  # first the cases that bring most
        for case in cases:
            if len(pairs[case] & missing) >= new:
                chosen.add(case)
                missing -= pairs[case]
    return {
        name: [pair for pair in all_ if (*pair, name) in chosen]
        for name, all_ in grid.items()
    }


def pairwise(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Of the product of some axes, enough cases to have every value of each with every value of the others.

    >>> pairwise("ab", "xy", (0, 1))
    [('a', 'x', 0), ('a', 'y', 1), ('b', 'x', 1), ('b', 'y', 0)]
    """
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in places}
    missing, chosen = set().union(*pairs.values()), set()
    for new in range(
        len(axes) * (len(axes) - 1) // 2, 0, -1
    ):  # first the cases that bring most
        for case in places:
            if len(pairs[case] & missing) >= new:
                chosen.add(case)
                missing -= pairs[case]
    values = [list(axis) for axis in axes]
    return [tuple(values[n][i] for n, i in enumerate(case)) for case in sorted(chosen)]


def each(more: Collection[Any], fewer: Collection[Any]) -> list[tuple[Any, Any]]:
    """Of the product of two axes that have little to do with each other, enough cases to have every value of both.

    >>> each("abcd", (0, 1))
    [('a', 0), ('b', 1), ('c', 1), ('d', 0)]
    """
    one, other = list(more), list(fewer)
    if len(one) < len(other):
        return [(first, second) for second, first in each(other, one)]
    return [
        (value, other[(i + i // len(other)) % len(other)])
        for i, value in enumerate(one)
    ]


def first_met(pairs: list[Pair]) -> set[Pair]:
    """Those that bring a method or a layer that none before them had.

    >>> sorted(first_met([("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]))
    [('a', 'x'), ('a', 'y'), ('b', 'x')]
    """
    seen: set[str] = set()
    return {
        pair for pair in pairs if not seen.issuperset(pair) and not seen.update(pair)
    }


def marked(pairs: list[Pair], quick: set[Pair]) -> list[Any]:
    """Pairs as parameters of a test, slow unless they are `quick`."""
    slow = pytest.mark.slow
    return [
        pytest.param(*pair, id="-".join(pair), marks=() if pair in quick else slow)
        for pair in pairs
    ]
