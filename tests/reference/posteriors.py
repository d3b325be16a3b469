"""The posteriors of all methods, by the papers' equations: parameters, noise, weights, KL.

Sizes: K members or components, S draws, n examples of a draw, L lines: draws, or examples
of draws where each has its own.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from reference.divergences import (
    cauchy_quantile,
    factor_divergence,
    full_divergence,
    weight_divergence,
)
from reference.places import Numbers, Place, Tensors
from torch import Tensor
from torch.distributions import Gamma, Independent, Normal
from torch.distributions import kl_divergence as divergence
from torch.func import functional_call

import slimbayes as sb


class Posterior:
    """The posterior of one place, under S draws of n examples each."""

    per_example = False
    constant: tuple[str, ...] = ()  # parameters that do not train

    def __init__(self, config: Any, place: Place, draws: int, examples: int) -> None:
        self.config, self.place = config, place
        self.draws, self.examples = draws, examples
        self.members = getattr(config, "members", 1)

    @property
    def lead(self) -> tuple[int, ...]:
        """The first axes of noise and draws."""
        return (self.draws, self.examples) if self.per_example else (self.draws,)

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor with `lead` first as lines, (L, ...)."""
        return tensor.flatten(0, 1) if self.per_example else tensor

    @property
    def member(self) -> Tensor:
        """The member of each line, (L,)."""
        of_draws = torch.arange(self.draws) % self.members
        if self.per_example:
            return of_draws.repeat_interleave(self.examples)
        return of_draws

    def line(self, row: int) -> int:
        """Which line serves a row of all draws' examples."""
        return row if self.per_example else row // self.examples

    def parameters(self, numbers: Numbers) -> Tensors:
        """Fixed parameters by name."""
        return {}

    def replaces(self) -> list[str]:
        """The network's own parameters that are among the posterior's."""
        return []

    def noise(self, numbers: Numbers) -> Tensors:
        """Fixed noise by name."""
        return {}

    def values(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensors:
        """The draws in the paper's words, (L, ...)."""
        weights, _ = self.weights(p, base, noise)
        return {"weight": weights}

    def weights(
        self, p: Tensors, base: Tensors, noise: Tensors
    ) -> tuple[Tensor, Tensor | None]:
        """Weights (L, *shape) and biases (L, out) of the draws."""
        raise NotImplementedError

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        """KL to the prior, of all members."""
        raise NotImplementedError

    def every_bias(self, base: Tensors) -> Tensor | None:
        """The network's own bias for each line."""
        own = self.place.own_bias(base)
        return None if own is None else own.expand(len(self.member), *own.shape)


class Factors(Posterior):
    """W' = W o r s^T of K members, or y = W (x + s) + r + b."""

    additive = False
    averages = 1  # rank
    random: tuple[str, ...] = ()
    member_bias = True

    @property
    def has_biases(self) -> bool:
        return self.member_bias and self.members > 1 and self.place.bias is not None

    def sizes(self) -> dict[str, int]:
        return {"r": self.place.n_out, "s": self.place.n_in}

    def locations(self, numbers: Numbers, neutral: float) -> Tensors:
        found = {
            f"{factor}.loc": neutral
            + 0.3 * numbers.normal(f"{factor}.loc", self.members, self.averages, size)
            for factor, size in self.sizes().items()
        }
        if self.has_biases:
            found["bias"] = numbers.normal("bias", self.members, self.place.n_out)
        return found

    def replaces(self) -> list[str]:
        return [self.place.bias_name] if self.has_biases else []

    def biases(self, p: Tensors, base: Tensors) -> Tensor | None:
        return p["bias"][self.member] if self.has_biases else self.every_bias(base)

    def perturbed(
        self, r: Tensor, s: Tensor, own: Tensor, biases: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Eq. 1 for factors (L, rank, channels)."""
        lines = range(len(r))
        if self.additive:
            shifts = [(s[j] @ own.T + r[j]).mean(0) for j in lines]
            assert biases is not None
            return own.expand(len(r), *own.shape), biases + torch.stack(shifts)
        weights = []
        for j in lines:
            pairs = zip(r[j], s[j], strict=True)
            masks = [self.place.outer(one, other) for one, other in pairs]
            weights.append(own * torch.stack(masks).mean(0))
        return torch.stack(weights), biases

    def weights(
        self, p: Tensors, base: Tensors, noise: Tensors
    ) -> tuple[Tensor, Tensor | None]:
        drawn = self.values(p, base, noise)
        own, biases = self.place.own_weight(base), self.biases(p, base)
        return self.perturbed(drawn["r"], drawn["s"], own, biases)


class RankOne(Factors):
    """Rank-1 Bayesian nets; BatchEnsemble is their case without noise."""

    def __init__(self, config: Any, place: Place, draws: int, examples: int) -> None:
        super().__init__(config, place, draws, examples)
        self.averages, self.member_bias = config.rank, config.member_bias
        self.additive = config.perturbation == "additive"
        self.family, self.prior, self.clip = "point", None, None
        if isinstance(config, sb.BatchEnsemble):
            return
        of_prior = {sb.Cauchy: "cauchy", sb.HalfCauchy: "lognormal"}
        of_prior |= {sb.LogNormal: "lognormal"}
        self.family = config.posterior or of_prior.get(type(config.prior), "normal")
        if self.family != "point":
            self.random = tuple(f for f in "rs" if config.random in (f, "both"))
            self.per_example = config.draws == "example"
        families = {"cauchy": sb.Cauchy, "lognormal": sb.LogNormal}
        self.prior = config.prior or families.get(self.family, sb.Normal)(
            self.neutral, 0.1
        )
        self.clip = config.clip
        if config.clip == "auto":
            self.clip = 2.0 if self.family == "cauchy" else 10.0

    @property
    def neutral(self) -> float:
        return 0.0 if self.family == "lognormal" or self.additive else 1.0

    def family_of(self, factor: str) -> str:
        return self.family if factor in self.random else "point"

    def parameters(self, numbers: Numbers) -> Tensors:
        found = self.locations(numbers, self.neutral)
        for factor in self.random:
            shape = found[f"{factor}.loc"].shape
            name = f"{factor}.scale"
            found[name] = 0.2 * numbers.positive(name, *shape)
        return found

    def noise(self, numbers: Numbers) -> Tensors:
        found = {
            factor: numbers.normal(
                f"noise {factor}", *self.lead, self.averages, self.sizes()[factor]
            )
            for factor in self.random
        }
        if self.random and self.config.mixture_kl == "exact":
            for factor in self.random:
                shape = self.members, self.averages, self.sizes()[factor]
                found[f"kl {factor}"] = numbers.normal(f"kl {factor}", *shape)
        return found

    def values(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensors:
        found = {}
        for factor in ("r", "s"):
            value = p[f"{factor}.loc"][self.member]
            if factor in self.random:
                scale = p[f"{factor}.scale"][self.member]
                e = self.flat(noise[factor])
                e = cauchy_quantile(e) if self.family == "cauchy" else e
                value = value + scale * e
                value = value.exp() if self.family == "lognormal" else value
            found[factor] = (
                value if self.clip is None else value.clamp(-self.clip, self.clip)
            )
        return found

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        total = torch.zeros(())
        for factor in self.random:
            loc, scale = p[f"{factor}.loc"], p[f"{factor}.scale"]
            terms = factor_divergence(self.family, loc, scale, self.prior)
            total = total + terms.sum()
        sums = not self.random or self.config.mixture_kl == "sum"
        return total if sums else total / self.members

    def log_densities(self, p: Tensors, noise: Tensors) -> Tensor:
        """log q_j of a draw of each member k, (K, K) of [j, k]."""
        total = torch.zeros(self.members, self.members)
        for factor in self.random:
            loc, scale = p[f"{factor}.loc"], p[f"{factor}.scale"]
            drawn = loc + scale * noise[f"kl {factor}"]
            every = Normal(loc.unsqueeze(1), scale.unsqueeze(1)).log_prob(drawn)
            total = total + every.flatten(2).sum(2)
        return total


def lower(matrix: Tensor) -> Tensor:
    return matrix.tril()


class JointFactors(Factors):
    """r, s, and perhaps biases with one Gaussian of full covariance for each member."""

    def __init__(self, config: Any, place: Place, draws: int, examples: int) -> None:
        super().__init__(config, place, draws, examples)
        self.member_bias = config.member_bias
        parts = {"both": ("r", "s"), "both+bias": ("r", "s", "bias")}
        self.random = parts.get(config.over, (config.over,))
        if place.bias is None:
            self.random = tuple(part for part in self.random if part != "bias")
        widths = self.sizes() | {"bias": place.n_out}
        self.widths = [widths[part] for part in self.random]
        self.size = sum(self.widths)
        self.full = self.size <= config.full_up_to

    def parameters(self, numbers: Numbers) -> Tensors:
        found = self.locations(numbers, 1.0)
        if self.full and self.config.directions is None:
            found["L"] = numbers.triangle("L", self.members, self.size)
            return found
        found["scale"] = 0.2 * numbers.positive("scale", self.members, self.size)
        if self.full:
            directions = numbers.normal(
                "directions", self.members, self.size, self.config.directions
            )
            found["directions"] = 0.5 * directions / math.sqrt(self.size)
        return found

    def noise(self, numbers: Numbers) -> Tensors:
        return {"e": numbers.normal("noise", self.draws, self.size)}

    def roots(self, p: Tensors) -> Tensor:
        """L (K, D, D) with the covariance L L^T."""
        if "L" in p:
            return lower(p["L"])
        root = torch.diag_embed(p["scale"])
        if "directions" not in p:
            return root
        v = p["directions"]
        return root @ (torch.eye(self.size) - v @ v.mT)

    def values(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensors:
        change = torch.einsum("nij,nj->ni", self.roots(p)[self.member], noise["e"])
        parts = dict(zip(self.random, change.split(self.widths, 1), strict=True))
        found = {}
        for factor in ("r", "s"):
            found[factor] = p[f"{factor}.loc"][self.member]
            if factor in parts:
                found[factor] = found[factor] + parts[factor].unsqueeze(1)
        if "bias" in parts:
            biases = self.biases(p, base)
            assert biases is not None
            found["bias"] = biases + parts["bias"]
        return found

    def weights(
        self, p: Tensors, base: Tensors, noise: Tensors
    ) -> tuple[Tensor, Tensor | None]:
        drawn = self.values(p, base, noise)
        weights, biases = super().weights(p, base, noise)
        return weights, drawn.get("bias", biases)

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        means, locs = [], []
        for part, width in zip(self.random, self.widths, strict=True):
            if part == "bias":
                own = p["bias"] if self.has_biases else self.place.own_bias(base)
                assert own is not None
                means.append(own.expand(self.members, width))
            else:
                means.append(p[f"{part}.loc"].squeeze(1))
            locs.append(
                torch.full((width,), 0.0 if part == "bias" else self.config.prior.loc)
            )
        return full_divergence(
            torch.cat(means, 1), self.roots(p), torch.cat(locs), self.config.prior.scale
        )


class _Cap(torch.autograd.Function):
    """A cap as a projection after each step: scales at it can fall, but not climb."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.cap = cap
        return scale.clamp(max=cap)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        stays = (scale > ctx.cap) & (gradient < 0)
        # The step is one of log sigma: d/d log sigma is the same on both sides.
        return torch.where(
            stays, 0.0, gradient * scale.clamp(max=ctx.cap) / scale
        ), None


class Gaussian(Posterior):
    """Independent Normals of all weights around the network's own."""

    @property
    def gaussian_bias(self) -> bool:
        return self.config.bias == "gaussian" and self.place.bias is not None

    def parameters(self, numbers: Numbers) -> Tensors:
        found = self.scale_parameters(numbers)
        if self.gaussian_bias:
            scale = numbers.positive("bias.scale", self.place.n_out)
            found["bias.scale"] = 0.2 * scale
        return found

    def scale_parameters(self, numbers: Numbers) -> Tensors:
        return {"scale": 0.2 * numbers.positive("scale", *self.place.shape)}

    def scales(self, p: Tensors) -> Tensor:
        return self.capped(p["scale"])

    def capped(self, scale: Tensor) -> Tensor:
        cap = self.config.max_scale
        return scale if cap is None else _Cap.apply(scale, cap)

    def noise(self, numbers: Numbers) -> Tensors:
        shape, estimator = self.place.shape, self.config.estimator
        if estimator == "local":
            outputs = self.draws, self.examples, *self.place.outputs
            return {"output": numbers.normal("output", *outputs)}
        found = {"weight": numbers.normal("noise weight", self.draws, *shape)}
        if self.gaussian_bias:
            found["bias"] = numbers.normal("noise bias", self.draws, self.place.n_out)
        if estimator == "flipout":
            for name, size in (("in", self.place.n_in), ("out", self.place.n_out)):
                lead = self.draws, self.examples
                signs = 2 * numbers.integers(f"sign {name}", 2, *lead, size) - 1
                found[f"sign {name}"] = signs.double()
        return found

    def deviations(self, p: Tensors, noise: Tensors) -> tuple[Tensor, Tensor | None]:
        bias = None
        if self.gaussian_bias:
            bias = self.capped(p["bias.scale"]) * noise["bias"]
        return self.scales(p) * noise["weight"], bias

    def values(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensors:
        if self.config.estimator == "local":
            return {}
        change, _ = self.deviations(p, noise)
        return {"weight": self.place.own_weight(base) + change}

    def weights(
        self, p: Tensors, base: Tensors, noise: Tensors
    ) -> tuple[Tensor, Tensor | None]:
        own = self.place.own_weight(base)
        change, shift = self.deviations(p, noise)
        biases = self.place.own_bias(base)
        if biases is not None:
            lines = biases.expand(self.draws, *biases.shape)
            biases = lines if shift is None else lines + shift
        if self.config.estimator != "flipout":
            return own + change, biases
        signed = []  # an example's signs flip rows and columns of the deviation
        for j in range(self.draws):
            for i in range(self.examples):
                signs = noise["sign out"][j, i], noise["sign in"][j, i]
                signed.append(own + change[j] * self.place.outer(*signs))
        if biases is not None:
            biases = biases.repeat_interleave(self.examples, 0)
        return torch.stack(signed), biases

    @property
    def per_example(self) -> bool:  # type: ignore[override]
        return self.config.estimator == "flipout"

    def local_output(
        self, module: Any, x: Tensor, p: Tensors, base: Tensors, noise: Tensors
    ) -> Tensor:
        """Outputs drawn from Normal(mean x, sigma^2 x^2)."""
        variances = {"weight": self.scales(p).square()}
        if self.place.bias is not None:
            variances["bias"] = torch.zeros(self.place.n_out)
        if self.gaussian_bias:
            variances["bias"] = self.capped(p["bias.scale"]).square()
        means = {"weight": self.place.own_weight(base)}
        if self.place.bias is not None:
            means["bias"] = base[self.place.bias_name]
        mean = functional_call(module, means, (x,))
        variance = functional_call(module, variances, (x.square(),))
        return mean + variance.sqrt() * noise["output"].flatten(0, 1)

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        prior = self.config.prior
        own, scale = self.place.own_weight(base), self.scales(p)
        total = weight_divergence(own, scale, prior, self.place.fan_in)
        own_bias = self.place.own_bias(base)
        if self.gaussian_bias and own_bias is not None:
            he = isinstance(prior, sb.HeNormal)
            of_bias = sb.Normal(0.0, 1.0) if he else prior
            scale = self.capped(p["bias.scale"])
            total = total + weight_divergence(own_bias, scale, of_bias, 1)
        return total


class KTied(Gaussian):
    """Standard deviations U V^T of the matrix view; rank 1 is the matrix normal."""

    @property
    def rank(self) -> int:
        return min(getattr(self.config, "rank", 1), *self.place.matrix)

    def scale_parameters(self, numbers: Numbers) -> Tensors:
        m, n = self.place.matrix
        size = math.sqrt(0.2 / self.rank)
        return {
            "U": size * numbers.positive("U", m, self.rank),
            "V": size * numbers.positive("V", n, self.rank),
        }

    def scales(self, p: Tensors) -> Tensor:
        return self.place.from_matrix(p["U"] @ p["V"].T)


class FullMatrixNormal(Posterior):
    """W = mean + A E B^T of the matrix view."""

    def parameters(self, numbers: Numbers) -> Tensors:
        m, n = self.place.matrix
        scale = math.sqrt(0.2)
        return {
            "A": numbers.triangle("A", m, scale=scale),
            "B": numbers.triangle("B", n, scale=scale),
        }

    def noise(self, numbers: Numbers) -> Tensors:
        return {"e": numbers.normal("noise", self.draws, *self.place.matrix)}

    def root(self, p: Tensors) -> Tensor:
        """The factor of the covariance of all weights, row after row of the matrix."""
        return torch.kron(lower(p["A"]), lower(p["B"]))

    def weights(
        self, p: Tensors, base: Tensors, noise: Tensors
    ) -> tuple[Tensor, Tensor | None]:
        change = (noise["e"].flatten(1) @ self.root(p).T).view_as(noise["e"])
        weights = self.place.own_weight(base) + self.place.from_matrix(change)
        return weights, self.every_bias(base)

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        prior = self.config.prior
        if isinstance(prior, sb.HeNormal):
            prior = sb.Normal(0.0, math.sqrt(prior.gain / self.place.fan_in))
        mean = self.place.to_matrix(self.place.own_weight(base)).reshape(1, -1)
        return full_divergence(mean, self.root(p)[None], prior.loc, prior.scale)


class FullNormal(FullMatrixNormal):
    """A full covariance of all weights of the matrix view."""

    def parameters(self, numbers: Numbers) -> Tensors:
        return {"L": numbers.triangle("L", math.prod(self.place.shape))}

    def root(self, p: Tensors) -> Tensor:
        return lower(p["L"])


class JointWeights(Posterior):
    """A Gaussian over all weights, in their own order, and the biases after them."""

    constant = "basis of outputs", "basis of inputs"

    def __init__(self, config: Any, place: Place, draws: int, examples: int) -> None:
        super().__init__(config, place, draws, examples)
        biases = 0 if place.bias is None else place.n_out
        self.size = math.prod(place.shape) + biases
        self.full = self.size <= config.full_up_to
        self.kronecker = not self.full and config.beyond == "kronecker"

    def parameters(self, numbers: Numbers) -> Tensors:
        if self.full:
            return {"L": numbers.triangle("L", self.size)}
        if not self.kronecker:
            return {"scale": 0.2 * numbers.positive("scale", self.size)}
        m, n = self.place.matrix
        m += self.place.bias is not None
        return {
            "scale": 0.2 * numbers.positive("scale", n, m),
            "basis of outputs": orthogonal(numbers.normal("left", n, n)),
            "basis of inputs": orthogonal(numbers.normal("right", m, m)),
        }

    def noise(self, numbers: Numbers) -> Tensors:
        return {"e": numbers.normal("noise", self.draws, self.size)}

    def root(self, p: Tensors) -> Tensor:
        if self.full:
            return lower(p["L"])
        if not self.kronecker:
            return torch.diag_embed(p["scale"])
        left, right = p["basis of outputs"], p["basis of inputs"]
        root = torch.kron(left, right) * p["scale"].flatten()
        # of the matrix (n, m + 1) row by row; the last column is the bias
        order = torch.arange(self.size).view(len(left), len(right))
        m = self.place.matrix[0]
        weights = self.place.from_matrix(order[:, :m].T).flatten()
        biased = self.place.bias is not None
        return root[torch.cat([weights, order[:, m]]) if biased else weights]

    def means(self, base: Tensors) -> Tensor:
        parts = [self.place.own_weight(base).flatten()]
        own = self.place.own_bias(base)
        return torch.cat(parts if own is None else [*parts, own])

    def weights(
        self, p: Tensors, base: Tensors, noise: Tensors
    ) -> tuple[Tensor, Tensor | None]:
        drawn = self.means(base) + noise["e"] @ self.root(p).T
        weights, biases = drawn.tensor_split([math.prod(self.place.shape)], 1)
        shaped = weights.reshape(-1, *self.place.shape)
        return shaped, None if self.place.bias is None else biases

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        prior = self.config.prior
        mean, root = self.means(base)[None], self.root(p)[None]
        return full_divergence(mean, root, prior.loc, prior.scale)


def orthogonal(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix).Q


class Components(Posterior):
    """Eq. 1 of the EMP paper: a weight is one of K components, or of its elements each.

    With a component at zero the others are divided by the probability of not being zero.
    """

    def __init__(self, config: Any, place: Place, draws: int, examples: int) -> None:
        super().__init__(config, place, draws, examples)
        if isinstance(config, sb.ModelPatch):
            assignment, self.zero = "element" if config.cross else "layer", False
            self.sigma = 0.0
        elif isinstance(config, sb.Mixture):
            assignment, self.zero = config.assignment, config.zero
            self.sigma = config.sigma
        else:
            assignment, self.zero = "element", True
            self.sigma = 0.0
        self.assignment = assignment
        dropped = isinstance(config, sb.DropConnect)
        self.components = 2 if dropped else config.components
        self.stored = self.components - self.zero
        self.per_example = config.draws == "example"
        self.members = self.components if assignment == "model" else 1
        self.learned = not dropped and config.learn_probs
        self.given = [1 - config.rate, config.rate] if dropped else config.probs
        mixes_bias = place.bias is not None and not self.zero
        self.mixes_bias = mixes_bias and self.stored > 1
        self.rho = config.tau if config.rho is None else config.rho
        self.shape = None if dropped else config.precision_shape
        self.size = math.prod(place.shape)
        elements = self.size + (place.n_out if self.mixes_bias else 0)
        counts = {"layer": 1, "element": elements, "input": place.n_in, "model": 0}
        self.picks = counts[assignment] if self.components > 1 else 0

    def parameters(self, numbers: Numbers) -> Tensors:
        found = {}
        if self.stored > 1:
            weights = numbers.normal("components", self.stored, *self.place.shape)
            found["components"] = 1 + weights if self.place.kind == "norm" else weights
        if self.mixes_bias:
            shape = self.bias_shape
            found["bias.components"] = numbers.normal(
                "bias.components", self.stored, *shape
            )
        if self.learned:
            found["logits"] = numbers.normal("logits", self.components)
        return found

    @property
    def bias_shape(self) -> tuple[int, ...]:
        norm = self.place.kind == "norm"
        return self.place.shape if norm else (self.place.n_out,)

    def replaces(self) -> list[str]:
        weight = [self.place.name] if self.stored > 1 else []
        return weight + ([self.place.bias_name] if self.mixes_bias else [])

    def noise(self, numbers: Numbers) -> Tensors:
        found = {}
        if self.picks and self.learned:
            shape = *self.lead, self.components, self.picks
            found["uniform"] = numbers.uniform("uniform", *shape)
        elif self.picks:
            # Every component in turn, in an order of its own.
            shape = *self.lead, self.picks
            order = numbers.uniform("pick", math.prod(shape)).argsort()
            found["pick"] = (order % self.components).view(shape)
        if self.sigma:
            biases = self.place.n_out if self.place.bias is not None else 0
            shape = *self.lead, self.size + biases
            found["e"] = numbers.normal("noise", *shape)
        return found

    def probabilities(self, p: Tensors) -> Tensor:
        if self.learned:
            return p["logits"].softmax(0)
        uniform = [1 / self.components] * self.components
        return torch.tensor(self.given or uniform)

    def shares(self, p: Tensors, noise: Tensors) -> Tensor:
        """How much of each component a line has, one-hot (L, K, picks)."""
        if self.assignment == "model" or not self.picks:
            one_hot = F.one_hot(self.member, self.components)
            return one_hot.unsqueeze(2).double()
        if not self.learned:
            one_hot = F.one_hot(self.flat(noise["pick"]), self.components)
            return one_hot.mT.double()
        uniform = self.flat(noise["uniform"])
        gumbel = -(-uniform.log()).log()
        scores = p["logits"].log_softmax(0).unsqueeze(1) + gumbel
        soft = scores.softmax(1)
        hard = F.one_hot(scores.argmax(1), self.components).mT.double()
        return hard + soft - soft.detach()

    def weights(
        self, p: Tensors, base: Tensors, noise: Tensors
    ) -> tuple[Tensor, Tensor | None]:
        weights = self.every_weight(p, base)
        shares, place = self.shares(p, noise), self.place
        of_bias = shares
        if self.assignment == "element" and self.picks:
            shares, of_bias = shares.tensor_split([self.size], 2)
        if self.assignment == "input":
            ones = torch.ones(place.n_out)
            own = [place.outer(ones, kept) * weights[0] for kept in shares[:, 0]]
            drawn = torch.stack(own)
        else:
            # one pick for all elements, or one for each
            drawn = (shares * weights.flatten(1)).sum(1).view(-1, *place.shape)
        if self.mixes_bias:
            every = p["bias.components"].flatten(1)
            biases = (of_bias * every).sum(1).view(-1, *self.bias_shape)
        else:
            biases = self.every_bias(base)
        if self.sigma:
            e = self.sigma * self.flat(noise["e"])
            drawn = drawn + e[:, : self.size].view(drawn.shape)
            if biases is not None:
                biases = biases + e[:, self.size :].view(biases.shape)
        return drawn, biases

    def every_weight(self, p: Tensors, base: Tensors) -> Tensor:
        """All components (K, *shape) as they are used."""
        found = p.get("components")
        if found is None:
            found = self.place.own_weight(base)[None]
        if not self.zero:
            return found
        kept = 1 - self.probabilities(p)[-1]
        return torch.cat([found / kept, torch.zeros_like(found[:1])])

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        probabilities, total = self.probabilities(p), torch.zeros(())
        if self.learned:
            uniform = torch.full((self.components,), 1 / self.components)
            terms = probabilities * (probabilities / uniform).log()
            total = total + self.picks * terms.sum()
        if self.config.tau is None:
            return total
        squares = self.every_weight(p, base).flatten(1).square().sum(1)
        total = total + self.cost(
            (probabilities * squares).sum(), self.size, self.config.tau
        )
        if self.place.bias is None:
            return total
        if self.mixes_bias:
            squares = p["bias.components"].flatten(1).square().sum(1)
            expected = (probabilities * squares).sum()
        else:
            expected = base[self.place.bias_name].square().sum()
        return total + self.cost(expected, math.prod(self.bias_shape), self.rho)

    def cost(self, squares: Tensor, count: int, precision: float) -> Tensor:
        """Of an expected sum of squares, under a precision that is fixed or inferred."""
        if self.shape is None:
            return 0.5 * precision * squares
        prior = Gamma(torch.tensor(self.shape), self.shape / precision)
        q = Gamma(prior.concentration + count / 2, prior.rate + squares / 2)
        expected_log = torch.digamma(q.concentration) - q.rate.log()
        cost = 0.5 * q.mean * squares - count / 2 * expected_log
        return cost + divergence(q, prior) + count / 2 * math.log(precision)


class Flow(Posterior):
    """A planar flow over the scales and biases of a norm layer."""

    def __init__(self, config: Any, place: Place, draws: int, examples: int) -> None:
        super().__init__(config, place, draws, examples)
        self.size = place.n_out * (1 if place.bias is None else 2)

    def parameters(self, numbers: Numbers) -> Tensors:
        shape = self.config.steps, self.size
        return {
            "scale": 0.3 * numbers.positive("scale", self.size),
            "u": 0.5 * numbers.normal("u", *shape),
            "w": numbers.normal("w", *shape),
            "c": numbers.normal("c", self.config.steps),
        }

    def noise(self, numbers: Numbers) -> Tensors:
        return {
            "e": numbers.normal("noise", self.draws, self.size),
            "kl": numbers.normal("kl", self.config.samples, self.size),
        }

    def flowed(self, p: Tensors, e: Tensor) -> tuple[Tensor, Tensor]:
        """Deviations (n, D), and log det of the steps by autograd (n,)."""

        def steps(d: Tensor) -> Tensor:
            for u, w, c in zip(p["u"], p["w"], p["c"], strict=True):
                product = w @ u
                wanted = -1 + F.softplus(product)
                u = u + (wanted - product) * w / (w @ w)
                d = d + u * torch.tanh(w @ d + c)
            return d

        base = p["scale"] * e
        moved = torch.stack([steps(d) for d in base])
        jacobians = [
            torch.autograd.functional.jacobian(steps, d, create_graph=True)
            for d in base
        ]
        return moved, torch.linalg.slogdet(torch.stack(jacobians)).logabsdet

    def means(self, base: Tensors) -> Tensor:
        weight, bias = self.place.own_weight(base), self.place.own_bias(base)
        return weight if bias is None else torch.cat([weight, bias])

    def weights(
        self, p: Tensors, base: Tensors, noise: Tensors
    ) -> tuple[Tensor, Tensor | None]:
        drawn = self.means(base) + self.flowed(p, noise["e"])[0]
        weights, biases = drawn.tensor_split([self.place.n_out], 1)
        return weights, None if self.place.bias is None else biases

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        """The entropy of the base is known; the rest is an average over draws."""
        change, log_det = self.flowed(p, noise["kl"])
        tau = self.config.tau
        rho = tau if self.config.rho is None else self.config.rho
        precisions = torch.tensor([tau, rho]).repeat_interleave(self.place.n_out)
        prior = Normal(torch.zeros(self.size), precisions[: self.size].rsqrt())
        log_p = Independent(prior, 1).log_prob(self.means(base) + change)
        entropy = Normal(torch.zeros(self.size), p["scale"]).entropy().sum()
        return -entropy - (log_det + log_p).mean()


class Dropout(Posterior):
    """Units of a layer's inputs, dropped for each example by itself."""

    per_example = True

    @property
    def rate(self) -> float:
        own = 0.3 if self.place.kind == "dropout" else 0.005  # of `cases.DROPOUT_MLP`
        return own if self.config.rate is None else self.config.rate

    def noise(self, numbers: Numbers) -> Tensors:
        uniform = numbers.uniform("keep", *self.lead, *self.place.inputs)
        return {"keep": (uniform >= self.rate).double()}

    def values(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensors:
        return {}

    def dropped(self, x: Tensor, noise: Tensors) -> Tensor:
        return x * self.flat(noise["keep"]) / (1 - self.rate)

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        return torch.zeros(())


class MemberNorm(Posterior):
    """Batch norm with statistics, and perhaps scales and biases, of each member."""

    def parameters(self, numbers: Numbers) -> Tensors:
        if not self.config.affine:
            return {}
        shape = self.members, self.place.n_out
        return {
            "members": 1 + 0.3 * numbers.normal("members", *shape),
            "bias.members": numbers.normal("bias.members", *shape),
        }

    def buffers(self, numbers: Numbers) -> Tensors:
        shape = self.members, self.place.n_out
        return {
            "running_mean": numbers.normal("running_mean", *shape),
            "running_var": numbers.positive("running_var", *shape),
        }

    def replaces(self) -> list[str]:
        both = [self.place.name, self.place.bias_name]
        return both if self.config.affine else []

    def values(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensors:
        return {}

    def normalised(
        self, module: Any, x: Tensor, p: Tensors, base: Tensors, buffers: Tensors
    ) -> Tensor:
        """The examples of each member by its own statistics, which move in training."""
        member = self.member.repeat_interleave(self.examples)
        out: list[Any] = [None] * len(x)
        for k in range(self.members):
            rows = (member == k).nonzero().squeeze(1)
            own = self.config.affine
            weight = p["members"][k] if own else self.place.own_weight(base)
            bias = p["bias.members"][k] if own else self.place.own_bias(base)
            statistics = buffers["running_mean"][k], buffers["running_var"][k]
            if not module.training:
                statistics = tuple(t.clone() for t in statistics)
            y = F.batch_norm(
                x[rows], *statistics, weight, bias, module.training, 0.1, module.eps
            )
            for row, value in zip(rows.tolist(), y, strict=True):
                out[row] = value
        return torch.stack(out)

    def kl(self, p: Tensors, base: Tensors, noise: Tensors) -> Tensor:
        return torch.zeros(())


KINDS: dict[type, type[Posterior]] = {
    sb.Rank1: RankOne,
    sb.BatchEnsemble: RankOne,
    sb.MeanField: Gaussian,
    sb.KTied: KTied,
    sb.MatrixNormal: KTied,
    sb.FullMatrixNormal: FullMatrixNormal,
    sb.ModelPatch: Components,
    sb.Mixture: Components,
    sb.DropConnect: Components,
    sb.FlowPatch: Flow,
    sb.MemberNorm: MemberNorm,
}
