"""The candidates for defaults: a method, a config, the temperature of its KL, and the starts it is for.

Every method has about as many: the same effort for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

import slimbayes as sb
from slimbayes.layers import kind_of

BOTH = ("scratch", "trained")


@dataclass(frozen=True)
class Candidate:
    """A config, perhaps one that depends on the network (EMP goes where norms are) and on its start."""

    method: str
    make: Callable[[nn.Module, str], sb.Config]
    temperature: float = 1.0
    starts: tuple[str, ...] = BOTH

    def config(self, net: nn.Module, start: str) -> sb.Config:
        return self.make(net, start)

    def describe(self) -> dict[str, Any]:
        """Plain data: what a record says of it, as for a network with norms."""
        config = self.make(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "scratch")
        found = {
            "method": self.method,
            "written": _written(config),
            "temperature": self.temperature,
        }
        return found | {"config": config.to_dict()}


def _written(config: sb.Config) -> str:
    """A config with what differs from the method's defaults."""
    usual, kind = type(config)(), type(config).__name__
    given = [
        f.name
        for f in fields(config)
        if getattr(config, f.name) != getattr(usual, f.name)
    ]  # type: ignore[arg-type]
    return f"{kind}({', '.join(f'{name}={getattr(config, name)!r}' for name in given)})"


def _fixed(
    method: str,
    config: sb.Config,
    temperature: float = 1.0,
    starts: tuple[str, ...] = BOTH,
) -> Candidate:
    return Candidate(method, lambda net, start: config, temperature, starts)


def _patch(method: str, patch: str = "norm+output", **options: Any) -> Candidate:
    def make(net: nn.Module, start: str) -> sb.Config:
        norms = any(kind_of(m) == "norm" for m in net.modules())
        return sb.ModelPatch(
            patch=patch if norms else "output", cross=method == "ECMP", **options
        )

    return Candidate(method, make)


def _rank1(
    temperature: float, spread: float, rate: float | None = None, scale: float = 0.1
) -> Candidate:
    """`rate` is of dropout with as much noise: by default 1e-3."""
    config = sb.Rank1(
        prior=sb.Normal(1.0, scale),
        mean_init=sb.Normal(1.0, spread),
        scale_init=None if rate is None else sb.dropout_scale(rate),
    )
    return _fixed("rank-1 Normal", config, temperature)


def _cauchy(
    temperature: float, spread: float, clip: float, scale: float | None = None
) -> Candidate:
    """Tails are heavy: of some hundred factors with the default start, 0.001, one in six rows has one off by a half."""
    config = sb.Rank1(
        prior=sb.Cauchy(1.0, 0.1),
        mean_init=sb.Normal(1.0, spread),
        clip=clip,
        scale_init=scale,
    )
    return _fixed("rank-1 Cauchy", config, temperature)


def _ensemble(spread: float) -> Candidate:
    return _fixed("BatchEnsemble", sb.BatchEnsemble(mean_init=sb.Normal(1.0, spread)))


def _gaussian(
    kind: type[Any], temperature: float, prior: Any = None, **options: Any
) -> Candidate:
    config = kind(prior=prior or sb.HeNormal(), **options)
    return _fixed(
        {"KTied": "2-tied", "MeanField": "mean-field"}[kind.__name__],
        config,
        temperature,
    )


CANDIDATES: dict[str, Candidate] = {
    "plain": _fixed("plain", sb.Deterministic()),
    "ensemble": _fixed("deep ensemble", sb.Ensemble(members=4), starts=("scratch",)),
    "be-signs": _fixed("BatchEnsemble", sb.BatchEnsemble(mean_init=sb.Signs(0.5))),
    "be-0.05": _ensemble(0.05),
    "be-0.1": _ensemble(0.1),
    "be-0.2": _ensemble(0.2),
    "be-0.3": _ensemble(0.3),
    "be-0.5": _ensemble(0.5),
    "r1n-default": _rank1(1.0, 0.05),
    "r1n-0.2": _rank1(1.0, 0.2),
    "r1n-0.5": _rank1(1.0, 0.5),
    "r1n-0.5-t0.1": _rank1(0.1, 0.5),
    "r1n-0.5-wide": _rank1(1.0, 0.5, 0.05, 0.3),
    "r1n-0.2-wide-t0.1": _rank1(0.1, 0.2, 0.05, 0.3),
    "r1n-0.3": _rank1(1.0, 0.3),
    "r1n-0.2-t0.3": _rank1(0.3, 0.2),
    "r1n-0.2-t0.1": _rank1(0.1, 0.2),
    "r1n-0.2-t0.03": _rank1(0.03, 0.2),
    "r1n-0.1-quiet": _rank1(1.0, 0.1, 1e-6),
    "r1n-0.2-calm-t0.1": _rank1(0.1, 0.2, 1e-4),
    "r1n-0.2-quiet-t0.1": _rank1(0.1, 0.2, 1e-6),
    "r1c-default": _cauchy(1.0, 0.05, 10.0),
    "r1c-clip2": _cauchy(1.0, 0.05, 2.0),
    "r1c-clip2-t0.1": _cauchy(0.1, 0.05, 2.0),
    "r1c-clip2-0.5-t0.1": _cauchy(0.1, 0.5, 2.0),
    "r1c-clip2-0.5-t0.01": _cauchy(0.01, 0.5, 2.0),
    "r1c-clip2-0.2": _cauchy(1.0, 0.2, 2.0),
    "r1c-clip2-0.2-t0.1": _cauchy(0.1, 0.2, 2.0),
    "r1c-clip2-0.2-t0.03": _cauchy(0.03, 0.2, 2.0),
    "r1c-clip2-0.2-t0.01": _cauchy(0.01, 0.2, 2.0),
    "r1c-clip2-0.2-quiet-t0.3": _cauchy(0.3, 0.2, 2.0, 1e-4),
    "r1c-clip2-0.2-quiet-t0.1": _cauchy(0.1, 0.2, 2.0, 1e-4),
    "r1c-clip2-0.2-quiet-t0.01": _cauchy(0.01, 0.2, 2.0, 1e-4),
    "r1c-clip2-0.1-t0.01": _cauchy(0.01, 0.1, 2.0),
    "r1c-clip2-0.1-t0.001": _cauchy(0.001, 0.1, 2.0),
    "kt-default": _gaussian(sb.KTied, 1.0, sb.Normal(0.0, 1.0)),
    "kt-he": _gaussian(sb.KTied, 1.0),
    "kt-he-t0.1": _gaussian(sb.KTied, 0.1),
    "kt-he-t0.01": _gaussian(sb.KTied, 0.01),
    "kt-he-t0.001": _gaussian(sb.KTied, 0.001),
    "kt-he-flip-t0.01": _gaussian(sb.KTied, 0.01, estimator="flipout"),
    "kt-he-flip-t0.001": _gaussian(sb.KTied, 0.001, estimator="flipout"),
    "kt-he-flip-t0.003": _gaussian(sb.KTied, 0.003, estimator="flipout"),
    "kt-he-flip-t0.03": _gaussian(sb.KTied, 0.03, estimator="flipout"),
    "kt-he-flip-t0.1": _gaussian(sb.KTied, 0.1, estimator="flipout"),
    "kt-he-small-t0.01": _gaussian(
        sb.KTied, 0.01, estimator="flipout", scale_init=3e-3
    ),
    "kt-he-quiet-t0.01": _gaussian(
        sb.KTied, 0.01, estimator="flipout", scale_init=1e-3
    ),
    "kt-he-quiet-t0.001": _gaussian(
        sb.KTied, 0.001, estimator="flipout", scale_init=1e-3
    ),
    "kt-n1-flip-t0.01": _gaussian(
        sb.KTied, 0.01, sb.Normal(0.0, 1.0), estimator="flipout"
    ),
    "mf-default": _gaussian(sb.MeanField, 1.0, sb.Normal(0.0, 1.0)),
    "mf-he": _gaussian(sb.MeanField, 1.0),
    "mf-he-t0.1": _gaussian(sb.MeanField, 0.1),
    "mf-he-t0.01": _gaussian(sb.MeanField, 0.01),
    "mf-he-t0.001": _gaussian(sb.MeanField, 0.001),
    "mf-he-flip-t0.001": _gaussian(sb.MeanField, 0.001, estimator="flipout"),
    "mf-he-flip-t0.003": _gaussian(sb.MeanField, 0.003, estimator="flipout"),
    "mf-he-flip-t0.01": _gaussian(sb.MeanField, 0.01, estimator="flipout"),
    "mf-he-flip-t0.1": _gaussian(sb.MeanField, 0.1, estimator="flipout"),
    "mf-he-small-t0.01": _gaussian(
        sb.MeanField, 0.01, estimator="flipout", scale_init=3e-3, scale_jitter=3e-4
    ),
    "mf-he-small-t0.03": _gaussian(
        sb.MeanField, 0.03, estimator="flipout", scale_init=3e-3, scale_jitter=3e-4
    ),
    "mf-he-quiet-t0.01": _gaussian(
        sb.MeanField, 0.01, estimator="flipout", scale_init=1e-3, scale_jitter=1e-4
    ),
    "mf-he-quiet-t0.001": _gaussian(
        sb.MeanField, 0.001, estimator="flipout", scale_init=1e-3, scale_jitter=1e-4
    ),
    "mf-n1-flip-t0.01": _gaussian(
        sb.MeanField, 0.01, sb.Normal(0.0, 1.0), estimator="flipout"
    ),
    "emp-default": _patch("EMP"),
    "emp-decay": _patch("EMP", tau=None),
    "emp-decay-rows": _patch("EMP", tau=None, draws="example"),
    "emp-decay-rows-0.5": _patch("EMP", tau=None, draws="example", jitter=0.5),
    "emp-3-rows-0.2": _patch("EMP", components=3, draws="example", jitter=0.2),
    "emp-norm-rows": _patch("EMP", "norm", draws="example"),
    "emp-norm-3-rows-0.2": _patch(
        "EMP", "norm", components=3, draws="example", jitter=0.2
    ),
    "emp-norm-2-rows-0.05": _patch("EMP", "norm", components=2, draws="example"),
    "emp-norm-3-rows-0.05": _patch("EMP", "norm", components=3, draws="example"),
    "emp-2-rows-0.2": _patch("EMP", components=2, draws="example", jitter=0.2),
    "emp-2-rows-0.05": _patch("EMP", components=2, draws="example"),
    "ecmp-default": _patch("ECMP"),
    "ecmp-decay": _patch("ECMP", tau=None),
    "ecmp-decay-rows": _patch("ECMP", tau=None, draws="example"),
    "ecmp-decay-rows-0.5": _patch("ECMP", tau=None, draws="example", jitter=0.5),
    "ecmp-3-rows-0.2": _patch("ECMP", components=3, draws="example", jitter=0.2),
    "ecmp-norm-rows": _patch("ECMP", "norm", draws="example"),
    "ecmp-norm-3-rows-0.2": _patch(
        "ECMP", "norm", components=3, draws="example", jitter=0.2
    ),
    "ecmp-norm-2-rows-0.05": _patch("ECMP", "norm", components=2, draws="example"),
    "ecmp-norm-3-rows-0.05": _patch("ECMP", "norm", components=3, draws="example"),
    "ecmp-2-rows-0.2": _patch("ECMP", components=2, draws="example", jitter=0.2),
    "ecmp-2-rows-0.05": _patch("ECMP", components=2, draws="example"),
}
