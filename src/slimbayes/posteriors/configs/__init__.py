"""One file per method, or family of them: its Config. METHODS is the closed list that configs are read back from."""

import pkgutil
from importlib import import_module
from typing import Any

from slimbayes.errors import brief, did_you_mean
from slimbayes.posteriors.configs.base import Config

_FOUND = [vars(import_module(f"{__name__}.{module.name}")) for module in pkgutil.iter_modules(__path__)]
# Every config in a file of this package that no other one extends is a method: the file is all that one needs.
METHODS: dict[str, type[Config]] = {
    name: value
    for names in _FOUND
    for name, value in names.items()
    if isinstance(value, type) and issubclass(value, Config) and not value.__subclasses__()
}


def config_from_dict(data: dict[str, Any]) -> Config:
    """Build the config of any method from its JSON form.

    >>> config_from_dict({"kind": "BatchEnsemble", "members": 8}).members
    8
    """
    method = data.get("kind")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"Unknown method {brief(method)}{did_you_mean(str(method)[:80], METHODS)}")
    return METHODS[method].from_dict(data)
