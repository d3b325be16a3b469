"""YAML as configs are written in it: one document of mappings, lists and scalars, within bounds.

Scalars are those of YAML 1.2's core schema, so that `yes`, `on` and dates are text, 010 is ten and 1e-3 is a number.
A key that is there twice, a key that is no text, and a tag are refused with their line. Anchors, aliases and merge keys
(`<<`) work; what aliases stand for counts as if it were written out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from slimbayes.errors import brief, cut
from slimbayes.untrusted import DEPTH

SIZE: Final = (
    1 << 20
)  # characters of a text: the longest table of a paper has some 20,000
NODES: Final = 50_000  # scalars, lists and mappings of a text, aliases written out
_PARSER: Any = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # the one in C takes a tenth of the time
_WORDS = {"": None, "~": None} | {
    form: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (word, word.title(), word.upper())
}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


class YamlError(ValueError):
    """A text that is no YAML, or more than a config needs; the message names the line and is short."""


def parse(text: str) -> Any:
    """What a YAML text holds.

    Example:
        >>> parse("{seed: 010, lr: 1e-3, name: yes, limits: [0x10, null]}")
        {'seed': 10, 'lr': 0.001, 'name': 'yes', 'limits': [16, None]}
        >>> parse("seed: 1\\nseed: 2")
        Traceback (most recent call last):
        ...
        slimbayes_lab.configs.yaml_text.YamlError: line 2: the key 'seed' is there twice
    """
    if len(text) > SIZE:
        raise YamlError(
            f"it has {len(text):,} characters, more than the {SIZE:,} that a config may have"
        )
    try:
        return _Reader(text).document()
    except yaml.YAMLError as error:
        raise YamlError(cut(" ".join(str(error).split()))) from None


def dump(tree: Any) -> str:
    """YAML that `parse` reads back as it was: text that looks like a number is quoted.

    Example:
        >>> dump({"name": "1e3", "seed": 1})
        "name: '1e3'\\nseed: 1\\n"
    """
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
    return text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _pattern in (_INT, _FLOAT):  # YAML 1.1 takes 1e3 and 0o7 for text
    _whole = re.compile(f"(?:{_pattern.pattern})$")
    _Dumper.add_implicit_resolver("tag:slimbayes,number", _whole, list("-+.0123456789"))  # type: ignore[no-untyped-call]


class _Reader:
    """Builds the values of a text from the parser's events, counting them."""

    def __init__(self, text: str) -> None:
        self.events: Iterator[Any] = yaml.parse(text, Loader=_PARSER)
        self.anchors: dict[
            str, tuple[Any, int]
        ] = {}  # what was named, and how many nodes it has
        self.nodes = 0

    def document(self) -> Any:
        next(self.events)
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return None
        tree = self.node(next(self.events), 0)
        next(self.events)
        if not isinstance(following := next(self.events), yaml.StreamEndEvent):
            raise _fault(following, "a second document begins; a config is one")
        return tree

    def node(self, event: Any, depth: int) -> Any:
        before = self.nodes
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise _fault(event, f"nothing above is named {brief(event.anchor)}")
            value, size = self.anchors[event.anchor]
            self.count(event, size)
            return copy.deepcopy(value)
        self.count(event, 1)
        if depth > DEPTH:
            raise _fault(event, f"it is nested deeper than {DEPTH} levels")
        if event.tag is not None:
            raise _fault(
                event, f"tags such as {brief(event.tag)} are not read; leave it out"
            )
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event) if event.implicit[0] else event.value
        else:
            value = (
                self.mapping(depth)
                if isinstance(event, yaml.MappingStartEvent)
                else self.sequence(depth)
            )
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.nodes - before)
        return value

    def count(self, event: Any, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > NODES:
            raise _fault(
                event, f"it has more than {NODES:,} values, aliases written out"
            )

    def sequence(self, depth: int) -> list[Any]:
        out = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            out.append(self.node(event, depth + 1))
        return out

    def mapping(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        below: list[dict[str, Any]] = []
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            if not isinstance(key, str):
                raise _fault(
                    event, f"a key must be text, got {brief(key)}: put it in quotes"
                )
            if key in out or (key == "<<" and below):
                raise _fault(event, f"the key {brief(key)} is there twice")
            value = self.node(next(self.events), depth + 1)
            if key == "<<":
                below += value if isinstance(value, list) else [value]
                if not all(isinstance(one, dict) for one in below):
                    raise _fault(event, "<< needs a mapping, or a list of them")
            else:
                out[key] = value
        return (
            {key: value for one in reversed(below) for key, value in one.items()} | out
            if below
            else out
        )


def _scalar(event: Any) -> Any:
    """A plain scalar by YAML 1.2's core schema."""
    text: str = event.value
    if text in _WORDS:
        return _WORDS[text]
    if not _FLOAT.fullmatch(text) and not _INT.fullmatch(text):
        return text
    if len(text) > 400:
        raise _fault(event, f"a number of {len(text):,} digits")
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _fault(event: Any, what: str) -> YamlError:
    return YamlError(f"line {event.start_mark.line + 1}: {what}")
