"""What is known of a method's draws, of its KL and of its size by other means than its own code.

`Answers` is right for any method whose draws are deviations from the layer's weight (`WeightPosterior`): such a method
adds its count alone. The others spell draws and densities out, element by element, or by torch's own.

Sizes: n draws, D weights.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.distributions.scales import rho_from_scale


class Matrix(NamedTuple):
    """A weight matrix as the papers count it: channels, whether there is a bias, and its matrix view (m, n)."""

    n_in: int
    n_out: int
    bias: bool
    m: int
    n: int


class Target(NamedTuple):
    """Where a draw is spelled out: a plain layer, the weight and bias of one of its sites (none of whole modules), and
    which row of which block it is for."""

    layer: nn.Module
    weight: Any
    bias: Any
    spread: Callable[
        [Tensor, Tensor], Tensor
    ]  # factors r (rank, out), s (rank, in) as one number for each weight
    block: int
    row: int

    def line(self, posterior: Any) -> int:
        return self.row if posterior.per_row else self.block


Density = tuple[Any, Any, Callable[[], None]]  # q, p, and what moves q to p


class Answers:
    """Draws are deviations from the layer's weight."""

    random = True  # whether draws of a member differ
    picks = False  # whether draws are among finitely many
    spelled = True  # whether a draw is a weight: not where activations are drawn, or perturbed
    exact = False  # whether a neutral draw by itself is the plain output to the bit
    rowwise = (
        False  # whether rows of a block may differ though the noise is the block's
    )
    tolerance = (1e-9, 1e-10)

    def __init__(self, config: Any) -> None:
        self.config = config

    def count(self, x: Matrix) -> int:
        """Posterior parameters of one weight matrix by the papers' formulas."""
        return 0

    def write(self, to: Target, posterior: Any) -> Tensor | None:
        """Write a draw's weight; returns what it adds to the bias."""
        to.weight.add_(posterior.values()[to.block])
        return None

    def densities(self, posterior: Any, layer: Any, site: str) -> list[Density]:
        """Of all that has a posterior, from its definition."""
        return []

    def neutral(self, posterior: Any, linear: Any) -> None:
        """No noise."""
        for name, parameter in posterior.named_parameters():
            if posterior.role(name) == "scale":
                nn.init.constant_(parameter, -40.0)

    def vary(self, posterior: Any) -> None:
        """Let members and components differ in what they start with in common."""
        if isinstance(getattr(posterior, "bias", None), nn.Parameter):
            nn.init.normal_(posterior.bias)


def _nothing() -> None:
    pass


def _free(layer: Any, linear: Any) -> Tensor:
    """Which weights are parameters: the padding word's vector is none."""
    free = torch.ones_like(linear.weight, dtype=torch.bool)
    if getattr(layer, "padding_idx", None) is not None:
        free[layer.padding_idx] = False
    return free


class Plain(Answers):
    random, exact = False, True


class Factors(Answers):
    """W[o, i] * mean_j r_j[o] * s_j[i]."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.random = self.exact = False
        if isinstance(config, sb.BatchEnsemble):
            self.exact = True
        else:
            self.random, self.spelled = True, config.perturbation != "additive"

    def count(self, x: Matrix) -> int:
        drawn = self.config.random if self.random else ""
        numbers = x.n_in * (2 if drawn in ("s", "both") else 1) + x.n_out * (
            2 if drawn in ("r", "both") else 1
        )
        return (
            self.config.members * self.config.rank * numbers
            + (self.config.members - 1) * x.n_out * x.bias
        )

    def write(self, to: Target, posterior: Any) -> Tensor | None:
        drawn, line = posterior.values(), to.line(posterior)
        to.weight.mul_(to.spread(drawn.r[line], drawn.s[line]))
        offsets = posterior._offsets(drawn)
        return None if offsets is None else offsets[line]

    def densities(self, posterior: Any, layer: Any, site: str) -> list[Density]:
        factors = [f for f in (posterior.r, posterior.s) if f.family is not sb.Point]
        return [(f.distribution(), f.prior, partial(_to_prior, f)) for f in factors]

    def neutral(self, posterior: Any, linear: Any) -> None:
        """Unit factors, zero for additive ones; their scales have a floor, so they become points."""
        for factor in (posterior.r, posterior.s):
            nn.init.constant_(factor.loc, 1.0 if self.spelled else 0.0)
            factor.family = sb.Point


def _to_prior(factor: Any) -> None:
    if type(factor.prior) is factor.family:
        nn.init.constant_(factor.loc, factor.prior.loc)
        nn.init.constant_(factor.rho, rho_from_scale(factor.prior.scale))


class Gaussian(Answers):
    """W + dW, with signs in Flipout; the local estimator draws outputs."""

    rowwise = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.spelled = config.estimator != "local"

    def count(self, x: Matrix) -> int:
        tied = isinstance(self.config, (sb.KTied, sb.MatrixNormal))
        scales = getattr(self.config, "rank", 1) * (x.m + x.n) if tied else x.m * x.n
        return scales + x.n_out * (x.bias and self.config.bias == "gaussian")

    def write(self, to: Target, posterior: Any) -> Tensor | None:
        drawn = posterior.values()
        signs: Tensor | float = 1.0
        if drawn.sign_in is not None:
            signs = to.spread(drawn.sign_out[to.row][None], drawn.sign_in[to.row][None])
        to.weight.add_(drawn.weight[to.block] * signs)
        return None if drawn.bias is None else drawn.bias[to.block]

    def densities(self, posterior: Any, layer: Any, site: str) -> list[Density]:
        linear = layer.linear_map(site)
        free = _free(layer, linear)
        q = sb.Normal(linear.weight[free], posterior.log_scale().exp()[free])
        found: list[Density] = [
            (q, posterior.prior, partial(_to_prior_weights, linear, posterior))
        ]
        if posterior.bias_log_scale is not None:
            found.append(
                (
                    sb.Normal(linear.bias, posterior.bias_log_scale.exp()),
                    posterior.prior,
                    _nothing,
                )
            )
        return found


def _to_prior_weights(linear: Any, posterior: Any) -> None:
    with torch.no_grad():
        for mean in (
            (linear.weight, linear.bias)
            if posterior.bias_log_scale is not None
            else (linear.weight,)
        ):
            mean.zero_()
    for name, parameter in posterior.named_parameters():
        ranks = parameter.shape[1] if name in ("log_u", "log_v") else 1
        share = 0.5 if name in ("log_u", "log_v") else 1.0
        nn.init.constant_(
            parameter, share * (math.log(posterior.prior.scale) - math.log(ranks))
        )


class FullMatrixNormal(Answers):
    """torch's own multivariate normal over the free weights (D,), with the covariance of the draws' Jacobian."""

    def count(self, x: Matrix) -> int:
        return (x.m * (x.m + 1) + x.n * (x.n + 1)) // 2

    def densities(self, posterior: Any, layer: Any, site: str) -> list[Density]:
        weight = layer.linear_map(site).weight
        free = _free(layer, layer.linear_map(site))
        for name, parameter in posterior.named_parameters():
            if name.endswith("below"):
                nn.init.normal_(parameter, std=0.5 / (2 * parameter.numel()) ** 0.25)
        kept = posterior.site.to_matrix(free.to(weight.dtype))

        def draw(noise: Tensor) -> Tensor:
            return posterior.site.from_matrix(posterior.spread(noise * kept))[0][free]

        jacobian = (
            torch.autograd.functional.jacobian(
                draw, torch.zeros(1, *posterior.site.matrix)
            )
            .flatten(1)
            .double()
        )
        q = torch.distributions.MultivariateNormal(
            weight[free].double(), jacobian @ jacobian.T
        )
        return [(Shared(q), posterior.prior, _nothing)]


class JointNormal(Answers):
    """torch's own multivariate normal of each member, (K, D), of the numbers that are parameters."""

    def count(self, x: Matrix) -> int:
        """Means beside the layer's own, standard deviations, and what lies below a diagonal."""
        config, over_weights = self.config, self.config.over == "weights"
        size = x.m * x.n if over_weights else x.n_in + x.n_out
        size += x.n_out * x.bias * (config.over in ("weights", "both+bias"))
        offsets = (config.members - 1) * x.n_out * x.bias
        means = 0 if over_weights else config.members * (x.n_in + x.n_out) + offsets
        return means + config.members * (
            size + size * (size - 1) // 2 * (size <= config.full_up_to)
        )

    def write(self, to: Target, posterior: Any) -> Tensor | None:
        if self.config.over != "weights":
            return Factors.write(self, to, posterior)  # type: ignore[arg-type]
        drawn = posterior.values()
        to.weight.add_(drawn[0][to.block])
        return drawn[1][to.block] if posterior.site.bias else None

    def densities(self, posterior: Any, layer: Any, site: str) -> list[Density]:
        free = torch.ones(posterior.size, dtype=torch.bool)
        if (
            posterior.site.kind == "table"
            and posterior.regularises_mean
            and layer.padding_idx is not None
        ):
            free[: posterior.site.shape[1]] = layer.padding_idx != 0
        loc, covariance = (
            posterior.means().detach()[:, free],
            posterior.covariance().detach()[:, free][:, :, free],
        )
        prior = type(posterior.prior)(posterior.locs(), posterior.prior.scale)
        return [
            (
                Shared(torch.distributions.MultivariateNormal(loc, covariance)),
                prior,
                _nothing,
            )
        ]

    def neutral(self, posterior: Any, linear: Any) -> None:
        super().neutral(posterior, linear)
        if self.config.over != "weights":
            Factors.neutral(self, posterior, linear)  # type: ignore[arg-type]


class Shared:
    """A joint distribution of torch, whose log density is given in equal shares for each number, (n, ..., D)."""

    def __init__(self, q: Any) -> None:
        self.q, self.loc = q, q.mean

    def rsample(self, noise: Tensor) -> Tensor:
        return self.q.sample((len(noise),))

    def log_prob(self, x: Tensor) -> Tensor:
        return (self.q.log_prob(x) / x.shape[-1]).unsqueeze(-1).expand_as(x)


class Flow(Answers):
    """A planar flow by its definition, one step after another, and its density by the Jacobian of all of it."""

    def count(self, x: Matrix) -> int:
        """Scales of the base; u, w and c of each step."""
        size = x.n_out * (2 if x.bias else 1)
        return size + self.config.steps * (2 * size + 1)

    def write(self, to: Target, posterior: Any) -> Tensor | None:
        line, size = to.line(posterior), to.weight.numel()
        moved = FlowDensity(posterior, to.weight, to.bias).moved(
            posterior.noise.block[line : line + 1]
        )[0]
        to.weight.copy_(moved[:size].view_as(to.weight))
        return None if to.bias is None else moved[size:].view_as(to.bias) - to.bias

    def densities(self, posterior: Any, layer: Any, site: str) -> list[Density]:
        linear = layer.linear_map(site)
        return [
            (
                FlowDensity(posterior, linear.weight, linear.bias),
                sb.Normal(0.0, 1.0),
                _nothing,
            )
        ]


class FlowDensity:
    """Of weight and bias (D,), at the latest draws."""

    def __init__(self, posterior: Any, weight: Tensor, bias: Tensor | None) -> None:
        self.loc = torch.cat(
            [t.detach().flatten() for t in (weight, bias) if t is not None]
        )
        self.posterior, self.log_q = posterior, torch.empty(0)

    def _flow(self, noise: Tensor) -> Tensor:
        q = self.posterior
        d = q.log_scale.detach().exp() * noise
        for u, w, c in zip(q.u.detach(), q.w.detach(), q.c.detach(), strict=True):
            inner = (w * u).sum()
            u = u + (torch.log1p(inner.exp()) - 1 - inner) * w / (w * w).sum()
            d = d + u * torch.tanh((w * d).sum() + c)
        return self.loc + d

    def moved(self, noise: Tensor) -> Tensor:
        return torch.stack([self._flow(one) for one in noise])

    def rsample(self, noise: Tensor) -> Tensor:
        jacobian = torch.vmap(torch.func.jacrev(self._flow))(noise)
        base = sb.Normal(0.0, 1.0).log_prob(noise).sum(1)
        self.log_q = base - torch.linalg.slogdet(jacobian)[1]
        return self.moved(noise)

    def log_prob(self, x: Tensor) -> Tensor:
        """log q of the latest draws, in equal shares for each element, (n, D)."""
        return self.log_q.unsqueeze(1).expand_as(x) / x.shape[1]


class Picks(Answers):
    """Components that are picked, overwritten element by element."""

    picks = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        shared = isinstance(config, sb.ModelPatch) and not (
            config.cross or config.learn_probs
        )
        self.random = getattr(config, "assignment", "") != "model"
        self.exact = not self.random or (shared and config.draws != "example")

    def count(self, x: Matrix) -> int:
        """(K - 1)((I + 1) O), one component less if it is zero, and K numbers if probabilities are learned."""
        learned = self.config.components * getattr(self.config, "learn_probs", False)
        free = self.config.components - 1 - getattr(self.config, "zero", False)
        return free * (x.m * x.n + x.n_out * x.bias) + learned

    def write(self, to: Target, posterior: Any) -> Tensor | None:
        drawn, line, config = posterior.values(), to.line(posterior), posterior.config
        kept = float(1 - posterior.probs[-1]) if config.zero else 1.0
        if config.assignment == "input":
            mask = (drawn.weight[line] == 0).double() / kept
            to.weight.mul_(
                to.spread(torch.ones(1, posterior.site.n_out).double(), mask[None])
            )
            return None
        sides = (
            (to.weight, posterior.weight, drawn.weight, 0),
            (to.bias, posterior.bias, drawn.bias, to.weight.numel()),
        )
        for target, others, z, start in sides:
            if target is None or (target is to.bias and config.zero):
                continue
            own = target.clone()
            for flat, place in enumerate(_places(target)):
                k = (
                    _picked(drawn, z[line], place, start + flat)
                    if others is not None or config.zero
                    else 0
                )
                if config.zero:
                    target[place] = own[place] / kept if k == 0 else 0.0
                elif k:
                    target[place] = others[(k - 1, *place)]
                if config.sigma and (target is to.weight or posterior.site.bias):
                    target[place] += config.sigma * drawn.noise[line, start + flat]
        return None

    def neutral(self, posterior: Any, linear: Any) -> None:
        """Every component the layer's own; a component at zero gets no probability."""
        posterior.config = replace(posterior.config, sigma=0.0)
        if posterior.config.zero:
            posterior.probs.copy_(torch.tensor([1.0, 0.0]))
        with torch.no_grad():
            for others, own in (
                (posterior.weight, linear.weight),
                (posterior.bias, linear.bias),
            ):
                if others is not None:
                    others.copy_(own)


def _places(target: Tensor) -> list[tuple[int, ...]]:
    places = torch.cartesian_prod(*(torch.arange(n) for n in target.shape)).view(
        -1, target.dim()
    )
    return [tuple(place) for place in places.tolist()]


def _picked(drawn: Any, z: Tensor, place: tuple[int, ...], flat: int) -> int:
    z = z.argmax(0) if z.is_floating_point() else z  # one-hot along the first axis
    if (
        drawn.mixed is not None and z.dim()
    ):  # of scales and biases of a norm, side by side
        return int(z[flat])
    return int(z if z.dim() == 0 else z[place])


class DropConnect(Picks):
    tolerance = (1e-6, 1e-7)  # rates are float32

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.exact = True

    def count(self, x: Matrix) -> int:
        return 0


class Dropout(Answers):
    """Units are dropped."""

    spelled = False
    tolerance = DropConnect.tolerance

    def neutral(self, posterior: Any, linear: Any) -> None:
        posterior.rate, posterior.fixed = 0.0, True


class Members(Answers):
    """Whole modules, whose parameters are counted by whoever has the module."""

    random, exact = False, True

    def write(self, to: Target, posterior: Any) -> Tensor | None:
        if member := to.block % (len(posterior.others) + 1):
            to.layer.load_state_dict(posterior.others[member - 1].state_dict())
        return None

    def neutral(self, posterior: Any, linear: Any) -> None:
        own = {
            n: t
            for n, t in posterior.layer.state_dict().items()
            if not n.startswith("posterior.")
        }
        for other in posterior.others:
            other.load_state_dict(own)


class MemberNorm(Answers):
    """The second member has scales, biases and statistics of its own, which start as copies."""

    random, exact = False, True

    def count(self, x: Matrix) -> int:
        return (self.config.members - 1) * 2 * x.n_out

    def write(self, to: Target, posterior: Any) -> Tensor | None:
        if to.block % 2:
            to.layer.load_state_dict(
                {n: t[0] for n, t in posterior.state_dict().items()}
            )
        return None

    def vary(self, posterior: Any) -> None:
        super().vary(posterior)
        nn.init.normal_(posterior.running_mean)
        nn.init.uniform_(posterior.running_var, 0.5, 2.0)


KNOWN: dict[type[sb.Config], type[Answers]] = {
    sb.Rank1: Factors, sb.BatchEnsemble: Factors, sb.JointNormal: JointNormal,
    sb.MeanField: Gaussian, sb.KTied: Gaussian, sb.MatrixNormal: Gaussian,
    sb.FullMatrixNormal: FullMatrixNormal, sb.FlowPatch: Flow,
    sb.ModelPatch: Picks, sb.Mixture: Picks, sb.DropConnect: DropConnect, sb.MCDropout: Dropout,
    sb.Ensemble: Members, sb.MemberNorm: MemberNorm, sb.Deterministic: Plain,
}  # fmt: skip
