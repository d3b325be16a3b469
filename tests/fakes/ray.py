"""The little of Ray that sweeps use, in this process: tasks run one after another. Notes what it hears."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

heard: list[tuple[Any, ...]] = []
tune = SimpleNamespace(reported=[])
tune.report = tune.reported.append


def init(address: str | None, log_to_driver: bool) -> None:
    heard.append(("init", address))


def remote(**options: Any) -> Callable[[Any], Any]:
    heard.append(("options", options))

    def task(work: Any) -> Any:
        if type(work).__name__ != "function":
            raise TypeError("The @ray.remote decorator must be applied to either a function or a class.")
        return SimpleNamespace(remote=work)

    return task


def get(results: list[Any]) -> list[Any]:
    return results


def shutdown() -> None:
    heard.append(("shutdown",))
