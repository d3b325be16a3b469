"""Wording shared by error messages, and the class of warnings."""

import difflib
import reprlib
from collections.abc import Iterable


class SlimbayesWarning(UserWarning):
    """What is surely not an error and probably not meant."""


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 60
_brief.maxlong = 40
_brief.maxlevel = 3
_brief.maxdict = _brief.maxlist = _brief.maxtuple = 4


def brief(value: object) -> str:
    """A value in at most some hundred characters: messages name what was got, whatever its size.

    >>> brief([1.5, "yes"]), brief("x" * 1000)
    ("[1.5, 'yes']", "'xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxx'")
    """
    return cut(_brief.repr(value))


def cut(text: str, most: int = 300) -> str:
    """A text's beginning, with a word on what is left out.

    >>> cut("abcdef", most=3)
    'abc... (3 characters more)'
    """
    return (
        text
        if len(text) <= most
        else f"{text[:most]}... ({len(text) - most:,} characters more)"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Continue a sentence about an unknown word with the nearest known one and the whole list.

    >>> did_you_mean("cauchi", ["Cauchy", "Normal"])
    "; did you mean 'Cauchy'? Known: Cauchy, Normal."
    """
    names = list(known)
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word[:80].lower(), lower, n=1, cutoff=0.5)
    hint = f"; did you mean {lower[near[0]]!r}?" if near else "."
    return f"{hint} Known: {cut(', '.join(names), most=2000)}." if names else "."
