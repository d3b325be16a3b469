"""The distributions of the library: priors, posteriors and initialisers are all one of these.

A field holds a float (a prior in a config) or a tensor (a posterior built from parameters): the formulas are the same.
Every draw is a deterministic function of standard normal noise, so one flat noise tensor serves a whole network, and
noise can be an input of an exported graph.

    Normal      x = loc + scale * e
    Cauchy      x = loc + scale * tan(pi/2 * erf(e / sqrt 2))      inverse CDF of the normal's CDF
    LogNormal   x = exp(loc + scale * e)                           loc and scale live in log space
    HalfCauchy  prior only, on positive factors
    LogUniform  prior only: every order of magnitude is as likely as any other
    Point       x = loc, no noise, no KL
    Signs       initialiser only: +1 with probability `positive`, else -1

`kl.py` has the divergences between them, `priors.py` the priors on the weights of Gaussian posteriors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from slimbayes.errors import brief, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from slimbayes.distributions.priors import ScaleSums

    Value = float | Tensor
else:
    Value = (
        float  # what configs can say; torch is only loaded where tensors are at work
    )
FAMILIES: dict[
    str, type[Distribution]
] = {}  # by name; a class joins when it is defined


@dataclass(frozen=True)
class Distribution:
    """Base of every distribution: a family with a support, a reparameterised draw and a log density."""

    support: ClassVar[str] = "real"
    above_zero: ClassVar[
        tuple[str, ...]
    ] = ()  # fields that must be positive and finite
    per_layer: ClassVar[bool] = (
        False  # whether it follows from the weights of a layer: another one for each
    )

    def __post_init__(self) -> None:
        for name in self.above_zero:
            value = getattr(self, name)
            if not is_tensor(value) and not (value > 0 and math.isfinite(value)):
                raise ValueError(
                    f"{type(self).__name__} needs a positive, finite {name}, got {value!r}."
                )

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            FAMILIES[cls.__name__] = cls

    def rsample(self, noise: Tensor) -> Tensor:
        """Turn standard normal noise into draws, differentiably."""
        raise TypeError(
            f"{type(self).__name__} cannot be drawn from: it only serves as a prior."
        )

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density at x."""
        raise TypeError(f"{type(self).__name__} has no density.")

    def for_layer(self, fan_in: int) -> Distribution:
        """This prior on the weights of a layer of which so many inputs feed one output."""
        return self

    def for_biases(self) -> Distribution:
        """This prior on the biases beside them."""
        return self

    def of_weights(self, mean: Tensor, log_scale: Tensor) -> Distribution:
        """The density this prior stands for beside a Gaussian posterior with these means and log scales."""
        return self

    def initial(
        self,
        *shape: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Draw starting values for a parameter of this shape from torch's default generator."""
        import torch

        return self.rsample(torch.randn(shape, device=device, dtype=dtype))

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the family's name and its fields."""
        return {"kind": type(self).__name__} | {
            f.name: getattr(self, f.name) for f in fields(self)
        }


def is_tensor(value: Value) -> TypeGuard[Tensor]:
    """Whether a field is a tensor, without torch where it is a number."""
    return hasattr(value, "detach")


def log_of(value: Value) -> Value:
    return value.log() if is_tensor(value) else math.log(value)


@dataclass(frozen=True)
class _LocScale(Distribution):
    loc: Value = 0.0
    scale: Value = 1.0
    above_zero = ("scale",)


class Normal(_LocScale):
    """Gaussian with mean `loc` and standard deviation `scale`.

    >>> import torch
    >>> Normal(1.0, 0.1).rsample(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 1.1000])
    """

    def rsample(self, noise: Tensor) -> Tensor:
        return self.loc + self.scale * noise

    def log_prob(self, x: Tensor) -> Tensor:
        return (
            -0.5 * ((x - self.loc) / self.scale) ** 2
            - log_of(self.scale)
            - 0.5 * math.log(2 * math.pi)
        )

    def gaussian_kl(self, mean: Tensor, log_scale: Tensor) -> Tensor:
        """KL of independent Normal(mean, exp(log_scale)) weights to this prior, summed: a scalar.

        >>> import torch
        >>> Normal(0.0, 1.0).gaussian_kl(torch.zeros(3), torch.zeros(3))
        tensor(0.)
        """
        from slimbayes.distributions.sums import kl_of_scales, squared_norm

        loc, scale = float(self.loc), float(self.scale)
        return kl_of_scales(log_scale, math.log(scale)) + squared_norm(
            mean - loc if loc else mean
        ) * (0.5 / scale**2)

    def kl_of_sums(self, means: Sequence[Tensor], sums: ScaleSums) -> Tensor:
        """The same of weights whose scales are known by their sums, of one layer or, unless `per_layer`, of several."""
        from slimbayes.distributions.sums import squared_norms

        loc, scale = float(self.loc), float(self.scale)
        distance = squared_norms([mean - loc for mean in means] if loc else means) * (
            0.5 / scale**2
        )
        return sums.kl(scale).to(means[0].dtype) + distance


class Cauchy(_LocScale):
    """Cauchy with median `loc` and half-width `scale`: tails so heavy that it has no mean.

    >>> import torch
    >>> Cauchy(1.0, 0.1).rsample(torch.tensor([0.0, 0.6744898]))  # the quartile of the normal
    tensor([1.0000, 1.1000])
    """

    def rsample(self, noise: Tensor) -> Tensor:
        return self.loc + self.scale * standard_cauchy(noise)

    def log_prob(self, x: Tensor) -> Tensor:
        return (
            -(((x - self.loc) / self.scale) ** 2).log1p()
            - log_of(self.scale)
            - math.log(math.pi)
        )


class LogNormal(_LocScale):
    """exp of a Normal(loc, scale): positive, median exp(loc).

    >>> import torch
    >>> LogNormal(0.0, 0.5).rsample(torch.tensor([0.0]))
    tensor([1.])
    """

    support: ClassVar[str] = "positive"

    def rsample(self, noise: Tensor) -> Tensor:
        return (self.loc + self.scale * noise).exp()

    def log_prob(self, x: Tensor) -> Tensor:
        return Normal(self.loc, self.scale).log_prob(x.log()) - x.log()


@dataclass(frozen=True)
class HalfCauchy(Distribution):
    """|x| of a Cauchy(0, scale): the horseshoe's prior on a positive scale.

    >>> import torch
    >>> HalfCauchy(1.0).log_prob(torch.tensor(0.0)).exp()  # 2 / pi
    tensor(0.6366)
    """

    scale: Value = 1.0
    support: ClassVar[str] = "positive"
    above_zero = ("scale",)

    def log_prob(self, x: Tensor) -> Tensor:
        return Cauchy(0.0, self.scale).log_prob(x) + math.log(2.0)


@dataclass(frozen=True)
class LogUniform(Distribution):
    """Density proportional to 1 / |x|: scale-free, and improper (Kingma et al. 2015).

    Its KL is known up to a constant, which is chosen such that that of a Normal tends to zero as its mean does. Then
    that of a Cauchy tends to -0.477: only differences have a meaning.

    >>> import torch
    >>> LogUniform().log_prob(torch.tensor([1.0, 10.0])).diff()  # a tenth as dense
    tensor([-2.3026])
    """

    constant: ClassVar[float] = 0.5 * math.log(2 * math.pi * math.e) + 0.5 * (
        0.5772156649015329 + math.log(2)
    )

    def log_prob(self, x: Tensor) -> Tensor:
        return -x.abs().log() - self.constant


@dataclass(frozen=True)
class Point(Distribution):
    """All mass on `loc`: a trainable point estimate (a BatchEnsemble factor), or a constant initialiser.

    >>> Point(1.0).initial(2)
    tensor([1., 1.])
    """

    loc: Value = 1.0

    def rsample(self, noise: Tensor) -> Tensor:
        return self.loc + noise.new_zeros(noise.shape)


@dataclass(frozen=True)
class Signs(Distribution):
    """+1 with probability `positive`, otherwise -1: the random sign initialisation of BatchEnsemble.

    >>> Signs(1.0).initial(3)
    tensor([1., 1., 1.])
    """

    positive: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.positive <= 1:
            raise ValueError(
                f"Signs needs a probability between 0 and 1, got {self.positive!r}."
            )

    def initial(
        self,
        *shape: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        import torch

        positive = torch.rand(shape, device=device, dtype=dtype).lt(self.positive)
        return positive.to(dtype or torch.get_default_dtype()) * 2 - 1


def distribution_from_dict(data: dict[str, Any]) -> Distribution:
    """Build a distribution from its JSON form, refusing unknown families and fields.

    >>> distribution_from_dict({"kind": "Cauchy", "loc": 1.0, "scale": 0.1})
    Cauchy(loc=1.0, scale=0.1)
    """
    family = data.get("kind")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"Unknown distribution family {brief(family)}{did_you_mean(str(family)[:80], FAMILIES)}"
        )
    values = {k: v for k, v in data.items() if k != "kind"}
    known = [f.name for f in fields(FAMILIES[family])]
    for name in values:
        if name not in known:
            raise ValueError(
                f"{family} has no field {name!r}{did_you_mean(name, known)}"
            )
    return FAMILIES[family](**values)


def check_pair(q: type[Distribution], p: type[Distribution]) -> None:
    """Refuse a posterior and prior whose KL is infinite or undefined."""
    if p in (Point, Signs):
        raise ValueError(f"{p.__name__} cannot serve as a prior: it has no density.")
    if q in (HalfCauchy, LogUniform, Signs):
        raise ValueError(
            f"{q.__name__} cannot serve as a posterior: choose Normal, Cauchy, LogNormal or Point."
        )
    if q is Point:
        return
    if q.support == "real" and p.support == "positive":
        raise ValueError(
            f"A {q.__name__} posterior puts mass on negative values where a {p.__name__} prior has none, "
            f"so their KL is infinite. Use a LogNormal posterior, or a Normal or Cauchy prior."
        )
    if q is LogNormal and p is LogUniform:
        raise ValueError(
            "KL(LogNormal || LogUniform) falls without end as the scale grows. Use a Normal or Cauchy posterior."
        )
    if q is Cauchy and p is Normal:
        raise ValueError(
            "KL(Cauchy || Normal) is infinite: a Cauchy posterior has no second moment. "
            "Use a Cauchy prior, or a Normal posterior under the Cauchy prior."
        )


def standard_cauchy(noise: Tensor) -> Tensor:
    """Turn standard normal noise into standard Cauchy noise by matching quantiles.

    The tail is taken from erfc, which keeps full relative precision where 1 - erf would round to zero.

    >>> import torch
    >>> standard_cauchy(torch.tensor([0.6744898, -0.6744898])).round(decimals=4)  # the quartiles
    tensor([ 1., -1.])
    """
    import torch

    tail = torch.special.erfc(noise.abs() * math.sqrt(0.5)).clamp_min(
        torch.finfo(noise.dtype).tiny
    )
    return (
        torch.sign(noise) / torch.tan(0.5 * math.pi * tail).abs()
    )  # float pi / 2 may round past the pole
