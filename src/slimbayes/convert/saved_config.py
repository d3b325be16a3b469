"""The config.json of a checkpoint: which modules were converted how, and what the base model was. Read as it might be
hostile: the form of every field is checked before any is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimbayes.errors import brief, cut
from slimbayes.files import CheckpointError
from slimbayes.untrusted import parse_json

# A type, a list of one form, a mapping from any name to one form (the key str), or fields by name.
_FORM: Any = {
    "conversions": [
        {"module": str, "batch_dim": (int, type(None)), "groups": [{"config": {str: object}, "layers": [str]}]}
    ],
    "base": {"shapes": {str: [int]}, "sha256": str},
}


def read_config(data: bytes, file: Path) -> dict[str, Any]:
    """The fields of a config.json; CheckpointError names the one that is missing or of another form."""
    try:
        config = parse_json(data)
        _check(config, _FORM, "")
        _check(config.setdefault("noise_rule", []), [float], "noise_rule")
        for number, record in enumerate(config["conversions"]):
            record.setdefault("saved", [])
            record.setdefault("frozen", 0)
            for name in ("saved", "heads"):
                _check(record.get(name, []), [str], f"conversions.{number}.{name}")
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {cut(str(error))}.") from error
    found: dict[str, Any] = config
    return found


def _check(value: Any, form: Any, place: str) -> None:
    needed: Any = type(form) if isinstance(form, list | dict) else form
    if not isinstance(value, needed) or (needed is not object and isinstance(value, bool)):
        name = getattr(needed, "__name__", "int or null")
        raise ValueError(f"{place or 'the whole'} must be {name}, got {brief(value)}")
    if isinstance(form, list):
        for number, inner in enumerate(value):
            _check(inner, form[0], f"{place}.{number}".lstrip("."))
    elif isinstance(form, dict) and str in form:
        for name, inner in value.items():
            _check(inner, form[str], f"{place}.{cut(name, most=60)}")
    elif isinstance(form, dict):
        for name, inner in form.items():
            if name not in value:
                raise ValueError(f"{f'{place}.{name}'.lstrip('.')} is missing")
            _check(value[name], inner, f"{place}.{name}".lstrip("."))
