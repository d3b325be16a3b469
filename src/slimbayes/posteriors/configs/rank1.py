"""The configs of methods over rank-1 factors: rank-1 Bayesian neural nets, BatchEnsemble, and Gaussians that join all
factors, or all weights, of a layer. posteriors/rank1.py and posteriors/joint_normal.py say what they are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from slimbayes.distributions.families import (
    Cauchy,
    Distribution,
    HalfCauchy,
    LogNormal,
    LogUniform,
    Normal,
    Point,
    Signs,
    check_pair,
)
from slimbayes.distributions.scales import dropout_scale, rho_from_scale
from slimbayes.posteriors.configs.base import (
    Count,
    Family,
    NormalPrior,
    NotNegative,
    Positive,
    SiteConfig,
    Whole,
    check_number,
)

if TYPE_CHECKING:
    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


FamilyName = Literal["normal", "cauchy", "lognormal", "point"]
_FAMILY_OF_PRIOR = {
    Normal: "normal", Cauchy: "cauchy", LogNormal: "lognormal", HalfCauchy: "lognormal", LogUniform: "normal"
}  # fmt: skip
FAMILY: dict[str, type[Distribution]] = {
    "normal": Normal,
    "cauchy": Cauchy,
    "lognormal": LogNormal,
    "point": Point,
}


class FactorConfig(SiteConfig):
    """What configs of rank-1 methods share: where they go."""

    covers = ("matrix", "quantised", "table")
    leaves_tables = "rank-1 methods leave embeddings alone, as the paper does"

    def _values(self) -> tuple[Any, ...]:
        whole: Any = self.resolved()
        return tuple(getattr(whole, field.name) for field in fields(whole))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FactorConfig)
            and type(other) is type(self)
            and self._values() == other._values()
        )

    def __hash__(self) -> int:
        return hash(self._values())


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank1(FactorConfig):
    """Rank-1 Bayesian neural net: distributions over one input and one output factor of every weight matrix.

    What is left open stays None and follows from the rest; `resolved()` says everything. Configs are equal if they
    resolve alike, and files hold the resolved form, so that later defaults change no saved model.

    Args:
        members: K, the number of mixture components.
        posterior: family of q(r) and q(s); by default that of the prior.
        prior: prior of every factor; by default the posterior's family around the neutral factor with scale 0.1.
        random: which factors are distributions, "both", "r" (outputs) or "s" (inputs); the other stays a point
            estimate.
        perturbation: "multiplicative" is Eq. 1; "additive" is y = W (x + s) + r + b.
        mean_init: where posterior means start: `Normal(1, v)`, `Signs(p)` or `Point(1)` (the model exactly as it was).
            By default Normal(1, 0.05): members differ, but a trained network stays close to itself. The paper trains
            from Normal(1, 0.5).
        scale_init: where posterior scales start. `dropout_scale(p)` turns a dropout rate into one; by default rate 1e-3
            (cauchy: 1e-6), the paper's "deterministic" initialisation.
        scale_jitter: standard deviation of the jitter around `scale_init`, in softplus space (cauchy: none).
        clip: factors are clipped to [-clip, clip] after drawing; None turns it off. By default at 10, as in the paper's
            code, but Cauchy factors at 2, which scored better (docs/recipes.md).
        member_bias: whether members get their own biases.
        rank: p, the number of averaged rank-1 products.
        draws: "example" draws fresh factors for every row (the paper); "member" once per member and pass.
        mixture_kl: "sum" adds up the members' KLs, as the paper's code does: K networks, each with a prior. "mean" and
            "exact" take the members for one mixture: "exact" is its KL, of which the part that has no closed form is
            drawn once for each member and call; "mean" is at most log K above it (distributions/kl.py).

    Example:
        >>> import slimbayes as sb, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> net = sb.bayesianize(net, sb.Rank1(members=4, prior=sb.Cauchy(1.0, 0.1)))
        >>> sb.sample(net, torch.randn(5, 3)).shape
        torch.Size([4, 5, 2])
    """

    members: Count = 4
    posterior: FamilyName | None = None
    prior: Family | None = None
    random: Literal["both", "r", "s"] = "both"
    perturbation: Literal["multiplicative", "additive"] = "multiplicative"
    mean_init: Family | None = None
    scale_init: float | None = None
    scale_jitter: NotNegative | None = None
    clip: float | Literal["auto"] | None = "auto"
    member_bias: bool = True
    rank: Count = 1
    draws: Literal["example", "member"] = "example"
    mixture_kl: Literal["sum", "mean", "exact"] = "sum"
    builds: ClassVar[str] = "rank1.Rank1Posterior"

    def __post_init__(self) -> None:
        for field in ("clip", "scale_init", "scale_jitter"):
            if getattr(self, field) != "auto":
                check_number(self, field, getattr(self, field))
        super().__post_init__()
        if self.prior is not None:
            check_pair(FAMILY[self.family], type(self.prior))
            if type(self.prior) not in _FAMILY_OF_PRIOR:
                known = ", ".join(prior.__name__ for prior in _FAMILY_OF_PRIOR)
                raise ValueError(
                    f"Rank1: {type(self.prior).__name__} is no prior of factors; use one of {known}."
                )
        if self.family == "lognormal" and self.perturbation == "additive":
            raise ValueError(
                "Rank1: a lognormal factor is never zero, so it has no neutral additive value. "
                "Use perturbation='multiplicative'."
            )
        if self.family == "lognormal" and isinstance(self.mean_init, Signs):
            raise ValueError(
                "Rank1: lognormal factors are positive, so they cannot start at random signs. "
                "Use mean_init=Normal(0.0, v), in log space."
            )
        if not (self.clip is None or self.clip == "auto" or self.clip > 0):
            raise ValueError(
                f"Rank1: clip must be positive or None, got {self.clip!r}."
            )
        if self.scale_init == 0 and self.family != "point":
            raise ValueError(
                "Rank1: scale_init must be positive, got 0. Factors of scale zero are points: "
                'use posterior="point", or BatchEnsemble.'
            )
        if self.scale_init:
            rho_from_scale(self.scale_init)

    @property
    def family(self) -> str:
        """Family of q(r) and q(s): `posterior`, or that of the prior."""
        return self.posterior or _FAMILY_OF_PRIOR.get(type(self.prior), "normal")

    def resolved(self) -> Rank1:
        """This config with everything filled in that was left open.

        Example:
            >>> Rank1(perturbation="additive").resolved().prior
            Normal(loc=0.0, scale=0.1)
        """
        family = self.family
        neutral = (
            0.0 if family == "lognormal" or self.perturbation == "additive" else 1.0
        )
        prior = {"cauchy": Cauchy, "lognormal": LogNormal}.get(family, Normal)
        open_ones: dict[str, Any] = {
            "posterior": family,
            "prior": prior(neutral, 0.1),
            "mean_init": Normal(neutral, 0.05),
            "scale_init": dropout_scale(1e-6 if family == "cauchy" else 1e-3),
            "scale_jitter": 0.0 if family == "cauchy" else 0.1,
        }
        filled = {
            name: value
            for name, value in open_ones.items()
            if getattr(self, name) is None
        }
        clip = (
            (2.0 if family == "cauchy" else 10.0) if self.clip == "auto" else self.clip
        )
        return replace(self, **filled, clip=clip)

    def to_dict(self) -> dict[str, Any]:
        """JSON form of the resolved config."""
        return super(Rank1, self.resolved()).to_dict()

    def extra_flops(self, site: Site) -> float:
        """p products instead of one, whose inputs and outputs are scaled: a multiplication is half a multiply-add."""
        rows, columns = site.matrix
        return (
            0.5 * self.rank * (site.n_in + site.n_out)
            + (self.rank - 1) * rows * columns
        )

    def describe(self) -> str:
        return f"Rank1({self.family}, members={self.members})"


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchEnsemble(FactorConfig):
    """BatchEnsemble: K members that share W and differ by point-estimated rank-1 factors and biases.

    Args: as in `Rank1`, but
        mean_init: where factors start. By default Normal(1, 0.2), which a trained network survives; from scratch
            Normal(1, 0.5) makes members differ more (docs/recipes.md), and Signs(0.5) is the paper's.

    Point factors have no prior and no scale, and a member makes the same prediction every time.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.BatchEnsemble(members=4))
        >>> sb.kl(net)
        tensor(0.)
    """

    members: int = 4
    perturbation: Literal["multiplicative", "additive"] = "multiplicative"
    mean_init: Distribution | None = None
    member_bias: bool = True
    rank: int = 1

    def __post_init__(self) -> None:
        self.resolved()

    def resolved(self) -> Rank1:
        start = self.mean_init or Normal(
            0.0 if self.perturbation == "additive" else 1.0, 0.2
        )
        return Rank1(
            members=self.members, posterior="point", perturbation=self.perturbation, mean_init=start,
            member_bias=self.member_bias, rank=self.rank, clip=None, draws="member",
        ).resolved()  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the start that follows from the rest."""
        return super(
            BatchEnsemble, replace(self, mean_init=self.resolved().mean_init)
        ).to_dict()


Over = Literal["both", "both+bias", "r", "s", "weights"]


@dataclass(frozen=True, kw_only=True)
class JointNormal(FactorConfig):
    """A Gaussian with a full covariance over the rank-1 factors of a layer, or over its weights: what `laplace` fits.

    Args:
        over: "both" factors, "both+bias", "r" (outputs) or "s" (inputs), the other one a point estimate; or the
            "weights" and biases themselves.
        members: K Gaussians that are mixed; of weights there is one.
        prior: a `Normal`, the same for every number; beside factors that of biases has mean zero. By default
            Normal(1, 0.1) of factors, and Normal(0, 1) of weights.
        scale_init: where standard deviations start; correlations start at zero.
        full_up_to: matrices with more numbers than that have independent ones: a covariance holds their square.
        beyond: what weights of such matrices have instead: "independent" numbers, or a covariance that is a "kronecker"
            product, of dense layers and convolutions without groups.
        mean_init: where factors start: `Point(1)` keeps a network as it was.
        member_bias: whether members get their own biases.
        directions: k, so that factors have the prior's kind of Gaussian but for k directions: what `laplace` finds
            where data tell of few. None for a covariance that is whole.

    Example:
        >>> import slimbayes as sb, torch
        >>> net = sb.bayesianize(torch.nn.Linear(4, 3), sb.JointNormal())
        >>> net.posterior["weight"].covariance().shape  # of 3 output and 4 input factors
        torch.Size([1, 7, 7])
    """

    over: Over = "both"
    members: Count = 1
    prior: NormalPrior | None = None
    scale_init: Positive = 0.01
    full_up_to: Whole = 1024
    beyond: Literal["independent", "kronecker"] = "independent"
    mean_init: Family = Point(1.0)  # noqa: RUF009 (immutable)
    member_bias: bool = True
    directions: Whole | None = None

    def __post_init__(self) -> None:
        if self.prior is None:
            usual = Normal(0.0, 1.0) if self.over == "weights" else Normal(1.0, 0.1)
            object.__setattr__(self, "prior", usual)
        super().__post_init__()
        if self.directions is not None and self.over == "weights":
            raise ValueError(
                f"JointNormal: directions are of factors, and over='weights' has none: got {self.directions}."
            )
        if self.beyond == "kronecker" and self.over != "weights":
            raise ValueError(
                f"JointNormal: a Kronecker product is of matrices, and factors are vectors: beyond='kronecker' needs "
                f"over='weights', got {self.over!r}."
            )
        if self.over == "weights" and self.members > 1:
            raise ValueError(
                f"JointNormal: weights have one member, got members={self.members!r}; use over='both'."
            )

    @property
    def covers(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("matrix", "table") if self.over == "weights" else super().covers

    def extra_flops(self, site: Site) -> float:
        """Of factors, as `Rank1`; weights are drawn once a pass."""
        return 0.0 if self.over == "weights" else 0.5 * (site.n_in + site.n_out)

    def build(self, site: Site) -> Posterior:
        from slimbayes.posteriors.joint_normal import JointFactors
        from slimbayes.posteriors.joint_weights import (
            JointWeights,
            KroneckerWeights,
            is_product,
        )

        if self.over != "weights":
            return JointFactors(self, site)
        return (
            KroneckerWeights(self, site)
            if is_product(self, site)
            else JointWeights(self, site)
        )

    def describe(self) -> str:
        return f"JointNormal({self.over}, members={self.members})"
