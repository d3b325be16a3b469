"""The general variational family of Ensemble Model Patching (Chang et al. 2019), of which its other methods are cases.

    Eq. 1   W = sum_k 1[Z = k] o (M_k + sigma e_k)        b likewise, with z
    Eq. 8   KL ~ sum_k p_k (tau/2 |M_k|^2 + rho/2 |m_k|^2)  up to a constant, for components that do not overlap

M_1 is the layer's own weight, so that its checkpoint still loads; the posterior holds the K - 1 others. What makes a
method is how the assignment Z is drawn (Table 2):

    assignment   one value of Z for                     method
    "layer"      the whole layer, its bias included     EMP (Eq. 4)
    "element"    each weight and each bias              ECMP (Eq. 5); DropConnect with the last component at zero
    "input"      each input channel                     dropout, with the last component at zero
    "model"      the whole model: a member              explicit ensemble

A component at zero leaves the bias alone, and the others are divided by the probability of not being zero, as inverted
dropout does: the mean of W is what it would be without it. Components that a pass does not pick get a gradient of
zero, not None: weight decay and momentum still move them. Errata of Eqs. 6, 7 and 9 are in docs/deviations.md.

Sizes: K components, n draws of a pass, in and out the channels of the layer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from slimbayes.distributions.kl import marginal_cost
from slimbayes.distributions.scales import widen
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.rows import LinearMap
from slimbayes.layers.site import Site
from slimbayes.posteriors import picks
from slimbayes.posteriors.base import Role, Support, WeightPosterior
from slimbayes.posteriors.configs.mixture import Mixture
from slimbayes.posteriors.picks import (
    Assigned,
    bias_shape,
    resets,
    select,
    start_components,
)


class MixturePosterior(WeightPosterior):
    """The K - 1 further components of one weight and bias, and the probabilities of all K."""

    own_role: ClassVar[Role] = "component"
    probs: Tensor

    def __init__(self, config: Mixture, site: Site) -> None:
        super().__init__()
        if site.kind == "norm" and not site.n_out:
            raise ValueError(
                "it has no scale or bias to put components on (affine=False)"
            )
        self.site, self.config = site, config
        self.components, self.members = config.components, config.members
        learned, biased = (
            config.components - 1 - config.zero,
            site.bias and not config.zero,
        )
        self.weight = (
            nn.Parameter(torch.zeros(learned, *site.shape)) if learned else None
        )
        self.bias = (
            nn.Parameter(torch.zeros(learned, *bias_shape(site)))
            if learned and biased
            else None
        )
        self.register_buffer("probs", torch.tensor(config.shares))
        self.logits = nn.Parameter(self.probs.log()) if config.learn_probs else None
        self.rho = config.tau if config.rho is None else config.rho
        self.regularises_mean = config.tau is not None
        self.regularises_bias = site.bias and self.rho is not None
        elements = math.prod(site.shape) + (site.n_out if self.bias is not None else 0)
        counts = {"model": 0, "layer": 1, "element": elements, "input": site.n_in}
        # How many independent values of Z one draw has.
        self.n_picks = 0 if self.components == 1 else counts[config.assignment]
        plain = self.n_picks > 0 and not (
            config.learn_probs or config.sigma or config.zero
        )
        # Whether picks are drawn for many layers at once.
        self.joins = plain and (
            config.assignment == "layer"
            or (config.assignment == "element" and site.kind == "norm")
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # to_empty materialises what was on the meta device: the values are those of the config
        exact = (
            torch.tensor(self.config.shares, device="cpu")
            if self.probs.is_meta
            else self.probs
        )
        super()._apply(fn, recurse)
        if not self.probs.is_meta:
            self.probs = exact.to(
                self.probs.device
            )  # a model cast to bfloat16 must not have its dropout rates rounded
        return self

    def centre(self, block: Tensor) -> Tensor:
        if self.config.assignment != "model" and self.components > 1:
            raise ValueError(
                f"{self.name}: a pick among {self.components} components has no mean that is one network; average "
                f"draws with predict(model, x, draws=...)."
            )
        return super().centre(block)

    @property
    def anchor(self) -> Tensor:
        weight = self._parameters.get("weight")  # asked several times in every pass
        weight = self.weight if weight is None else weight
        return self.probs if weight is None else weight

    def join(self, layer: Any) -> None:
        super().join(layer)
        afresh = (
            self.weight is not None
            and self.config.init != "copies"
            and self.site.kind != "norm"
        )
        if afresh and not resets(layer):
            lacks = f"a {type(layer).plain.__name__} has no reset_parameters to start components afresh"
            raise ValueError(f"{self.name}: {lacks}; use init='copies'.")

    def adopt(self) -> None:
        start_components(self.config, self.site, self.layer, self.weight, self.bias)

    def role(self, name: str) -> Role:
        return "logit" if name == "logits" else "component"

    @property
    def log_size(self) -> float:
        return (
            math.inf if self.config.sigma else self.n_picks * math.log(self.components)
        )

    def support(self) -> Support | None:
        if self.config.sigma or not self.n_picks:
            return super().support()
        return picks.support(
            self.n_picks, self.probabilities().detach(), learned=self.logits is not None
        )

    def widths(self, rowwise: bool) -> tuple[int, int]:
        width = self.n_picks * (1 if self.logits is None else self.components)
        if self.config.sigma:
            width += math.prod(self.site.shape) + (
                self.site.n_out if self.site.bias else 0
            )
        return (0, width) if self.config.draws == "example" and rowwise else (width, 0)

    def probabilities(self) -> Tensor:
        """Probabilities of the components, (K,), in float32 at least."""
        return (
            self.probs if self.logits is None else torch.softmax(widen(self.logits), 0)
        )

    @torch.no_grad()
    def set_probabilities(self, probs: Tensor) -> None:
        """Replace the probabilities of the components."""
        self.probs.copy_(probs)
        if self.logits is not None:
            self.logits.copy_(probs.clamp_min(torch.finfo(torch.float32).tiny).log())

    @classmethod
    def draw_together(cls, posteriors: Sequence[Self], current: Pass) -> None:
        picks.draw_alike(posteriors, current)
        super().draw_together([p for p in posteriors if not p.joins], current)

    def draw(self, noise: Noise) -> Assigned:
        count = self.n_picks * (1 if self.logits is None else self.components)
        drawn, eps = (
            self.lines[:, :count],
            self.lines[:, count:] if self.config.sigma else None,
        )
        if self.config.assignment == "model" or self.components == 1:
            z = super().choices()
            return Assigned(z, z, eps)
        z = (
            picks.by_edges(drawn, self.probs)
            if self.logits is None
            else picks.straight_through(drawn, self.logits)
        )
        if self.config.assignment != "element":
            z = z[..., 0] if self.config.assignment == "layer" else z
            return Assigned(z, z, eps)
        weight, bias = z.tensor_split([math.prod(self.site.shape)], -1)
        bias = bias if self.bias is None else bias.unflatten(-1, bias_shape(self.site))
        return Assigned(weight.unflatten(-1, self.site.shape), bias, eps)

    @property
    def countable(self) -> bool:
        shared = (
            self.config.assignment in ("layer", "model")
            and self.config.draws == "forward"
        )
        return (shared or self.components == 1) and not self.config.sigma

    def choices(self) -> Tensor:
        z: Tensor = self.values().weight
        return z.argmax(1) if z.is_floating_point() else z

    def others(self) -> tuple[Any, Any]:
        """The further components of the weight and of the bias, as they stand in the module; each may be None."""
        own = self._parameters
        if "weight" in own and "bias" in own:  # quicker than attributes of a module are
            return own["weight"], own["bias"]
        return self.weight, self.bias

    def _kept(self) -> Tensor | None:
        """Probability of not being zero, where there is a component at zero."""
        return (
            (1 - self.probabilities()[-1]).to(self.dtype) if self.config.zero else None
        )

    def _components(self, linear: LinearMap) -> tuple[Tensor, Tensor | None]:
        """Components of the weight, and of the bias where they are mixed: (K, ...)."""
        weights, biases = (
            picks.stack_components(
                linear.weight, self.weight, linear.mask, self._kept()
            ),
            None,
        )
        if self.bias is not None and linear.bias is not None:
            biases = picks.stack_components(linear.bias, self.bias, None, None)
        return weights, biases

    def weights(
        self, linear: LinearMap, draws: slice = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        drawn: Assigned = self.values()
        picked = drawn.weight[draws]
        if self.config.assignment == "input":
            mask = torch.stack(
                [
                    linear.outer(s.new_ones(self.site.n_out), s)
                    for s in self._mask()[draws]
                ]
            )
            weights, components = linear.weight * mask.to(linear.weight.dtype), None
        else:
            stacked, components = self._components(linear)
            weights = select(stacked, picked)
        biases = (
            linear.bias
            if linear.bias is None
            else linear.bias.expand(picked.shape[0], *linear.bias.shape)
        )
        biases = biases if components is None else select(components, drawn.bias[draws])
        if drawn.noise is None:
            return weights, biases
        # Eq. 1: sigma * e around the picked components
        eps, size = (
            self.config.sigma * drawn.noise[draws].to(weights.dtype),
            math.prod(self.site.shape),
        )
        if biases is not None and self.site.bias:
            biases = biases + eps[:, size:].view(biases.shape)
        return weights + eps[:, :size].view(weights.shape), biases

    def _mask(self) -> Tensor:
        """Input factors of dropout, (n, in): zero, or one over the probability of being kept."""
        z = self.values().weight
        kept = (
            z[:, :-1].sum(1)
            if z.is_floating_point()
            else (z < self.components - 1).to(self.dtype)
        )
        return kept / (1 - self.probabilities()[-1]).to(self.dtype)

    def forward(self, x: Tensor, linear: LinearMap) -> Tensor:
        drawn: Assigned = self.values()
        if drawn.mixed is not None:
            if drawn.weight.shape[0] == 1:
                return linear.op(x, *drawn.mixed)
            return linear.blocks(x, *drawn.mixed, self.current)
        if self.components == 1 and drawn.noise is None:
            return linear.op(x, linear.weight, linear.bias)
        if self.config.assignment == "input" and drawn.noise is None:
            return linear.add_bias(
                linear.modulated(operator.mul, x, self._mask(), None, self.current)
            )
        picked = drawn.weight
        one = (
            picked.dim() == 1 and not picked.is_floating_point() and drawn.noise is None
        )
        if one and picked.shape[0] > self.components and self.site.kind != "norm":
            weights, biases = self._components(linear)
            if biases is None and linear.bias is not None:
                biases = linear.bias.expand(self.components, -1)
            return linear.chosen(x, weights, biases, picked, self.current)
        return super().forward(x, linear)

    def served(self) -> tuple[Tensor, Tensor | None] | None:
        drawn: Assigned = self.values()
        return drawn.mixed if drawn.weight.shape[0] == 1 else None

    def materialize(
        self, linear: LinearMap, index: int
    ) -> tuple[Tensor, Tensor | None]:
        drawn: Assigned = self.values()
        if drawn.mixed is None:
            return super().materialize(linear, index)
        weight, bias = drawn.mixed
        one = drawn.weight.shape[0] == 1
        return (
            (weight, bias)
            if one
            else (weight[index], None if bias is None else bias[index])
        )

    @classmethod
    def kl_together(cls, posteriors: Sequence[Self]) -> list[Tensor]:
        """Eq. 8 for many layers in a few operations; what is drawn in another way one by one."""
        terms: list[Tensor] = []
        alike: dict[Any, list[Self]] = {}
        for p in posteriors:
            if p.config.tau is None or p.config.zero or p.config.precision_shape:
                terms.append(p.kl())
                continue
            alike.setdefault((p.components, p.device), []).append(p)
            terms += [] if p.logits is None else [p._kl_of_picks()]
        return terms + [picks.expected_squares(same) for same in alike.values()]

    def _kl_of_picks(self) -> Tensor:
        """One categorical variable for each pick, against a uniform one; nothing where probabilities are given."""
        p = self.probabilities()
        return (
            p.new_zeros(())
            if self.logits is None
            else self.n_picks * (p * (p * self.components).log()).sum()
        )

    def kl(self) -> Tensor:
        p, total, kept = (
            self.probabilities().to(self.dtype),
            self._kl_of_picks().to(self.dtype),
            self._kept(),
        )
        if self.config.tau is None or self.rho is None:
            return total
        linear = self.linear_map()
        # Eq. 8: sum_k p_k tau / 2 |M_k|^2
        of_weights = picks.expected_square(p, linear.weight, self.weight)
        of_weights = of_weights if kept is None else of_weights / kept**2
        total = total + self._penalty(
            of_weights, linear.weight.numel(), self.config.tau
        )
        if linear.bias is not None and self.bias is not None:
            of_biases = picks.expected_square(p, linear.bias, self.bias)
            total = total + self._penalty(of_biases, linear.bias.numel(), self.rho)
        elif (
            linear.bias is not None and self.site.bias
        ):  # a bias that is not mixed has probability one
            total = total + self._penalty(
                picks.squares(linear.bias, 0), linear.bias.numel(), self.rho
            )
        return total

    def _penalty(self, square: Tensor, count: int, mean: float) -> Tensor:
        """What an expected sum of squares costs under a precision that is fixed, or inferred."""
        shape = self.config.precision_shape
        return (
            mean / 2 * square
            if shape is None
            else marginal_cost(square, count, shape, mean)
        )
