"""The little of Ray that searches use."""

from types import SimpleNamespace

tune = SimpleNamespace(reported=[])
tune.report = tune.reported.append
