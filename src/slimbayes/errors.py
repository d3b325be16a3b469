"""Wording shared by error messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Continue a sentence about an unknown word with the nearest known one and the whole list.

    >>> did_you_mean("cauchi", ["Cauchy", "Normal"])
    "; did you mean 'Cauchy'? Known: Cauchy, Normal."
    """
    names = list(known)
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), lower, n=1)
    hint = f"; did you mean {lower[near[0]]!r}?" if near else "."
    return f"{hint} Known: {', '.join(names)}."
