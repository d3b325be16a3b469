"""The configs of methods that act on modules rather than on their weights: deep ensembles, which copy them, batch norm
with statistics for each member, and MC dropout, which drops their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from slimbayes.posteriors.configs.base import Config, Count, Rate, SiteConfig
from slimbayes.posteriors.configs.mixture import Layers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from slimbayes.layers.site import Site
    from slimbayes.posteriors.base import Posterior


@dataclass(frozen=True, kw_only=True)
class Ensemble(Config):
    """K networks that share nothing, trained and asked as one: the baseline of all three papers.

    Without `include`, `exclude` or a mapping the whole model is copied, whatever it is made of; with them, single
    layers are. `ensemble([...])` joins networks that exist already.

    Args:
        members: K.
        init: "fresh" starts the other members anew, each as the network itself would start: by its own initialiser
            (transformers', timm's), else by each layer's `reset_parameters`. A network that was started in another way
            does not tell how: then its members get the spread of its weights, with a warning. "copies" repeats the
            weights.
        factory: builds a fresh network of the same kind; then each other member is one, started as the network itself.
            It is not part of the config's JSON. The lab gives it for the networks of its configs.
        jitter: standard deviation of the noise on copied parameters, relative to their root mean square.

    Example:
        >>> import slimbayes as sb, torch
        >>> from torch import nn
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), Ensemble(members=5))
        >>> sb.sample(net, torch.randn(7, 3)).shape, sum(p.numel() for p in net.parameters())
        (torch.Size([5, 7, 2]), 250)
    """

    members: Count = 5
    init: Literal["fresh", "copies"] = "fresh"
    jitter: float = 0.0
    factory: Callable[[], Any] | None = field(default=None, repr=False, compare=False)
    whole: ClassVar[bool] = True
    covers = ("matrix", "table", "norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.jitter >= 0 or (self.jitter and self.init == "fresh"):
            needs = "jitter is noise on copies: it needs init='copies' and must not be negative"
            raise ValueError(f"Ensemble: {needs}, got {self.jitter!r}.")

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in super().to_dict().items()
            if name != "factory"
        }

    def of_networks_from(self, factory: Callable[[], Any]) -> Ensemble:
        return (
            self
            if self.init == "copies" or self.factory
            else replace(self, factory=factory)
        )

    def extra_parameters(self, layer: nn.Module, sites: Sequence[Site]) -> list[Tensor]:
        return [p for _ in range(self.members - 1) for p in layer.parameters()]


@dataclass(frozen=True, kw_only=True)
class MemberNorm(SiteConfig):
    """Batch norm with statistics, and perhaps a scale and a bias, for each member. It goes beside a method with as many
    members.

    In training every member that has rows needs two values or more for each channel, as batch norm itself does; a
    member without rows keeps its running statistics.

    Args:
        members: K. The first is the layer itself; the others start as copies of it.
        affine: members have scales and biases of their own, too, where the layer has any.

    Example:
        >>> import slimbayes as sb, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> net = sb.bayesianize(net, {"1": MemberNorm(members=4), ".*": sb.Rank1(members=4)})
        >>> sb.sample(net, torch.randn(5, 3)).shape, net[1].posterior["weight"].running_mean.shape
        (torch.Size([4, 5, 2]), torch.Size([3, 8]))
    """

    members: Count = 4
    affine: bool = False
    covers = ("norm",)
    builds: ClassVar[str] = "member_norm.MemberNormPosterior"

    def targets(
        self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool
    ) -> set[str] | None:
        from slimbayes.posteriors.target_layers import batch_norms

        return batch_norms(offered)

    def leaves_alone(self, layer: nn.Module) -> str:
        from slimbayes.posteriors.target_layers import why_no_batch_norm

        return why_no_batch_norm(layer)

    def describe(self) -> str:
        return f"MemberNorm(members={self.members}{', affine' if self.affine else ''})"


@dataclass(frozen=True, kw_only=True)
class MCDropout(SiteConfig):
    """Dropout that is part of the posterior: active in eval mode, drawn afresh for every row by `sample`, one mask for
    all rows under each draw of `predict` and `fixed_draws`.

    Args:
        rate: probability of dropping a unit; by default a dropout layer's own, and 0.005 (the paper's) elsewhere.
        before: None turns on the model's own dropout layers, or acts on the inputs of the layers that `include` or a
            mapping's pattern picks. "norm", "output", "input", joined by "+", or a regular expression put dropout in
            front of those layers.
        unit: "element" drops every number on its own (nn.Dropout); "channel" drops whole channels (nn.Dropout2d), or
            the same inputs at all positions, of a recurrent layer at each step anew. A dropout layer of the model keeps
            its own unit.

    The prior is left to weight decay. Dropout as a distribution over weights, with a prior (Eq. 2), for embeddings, and
    for recurrent layers with one mask at all steps, is `Mixture(components=2, assignment="input", zero=True,
    probs=(1 - rate, rate), draws="example")`.

    Example:
        >>> import slimbayes as sb, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        >>> pred = sb.predict(sb.bayesianize(net, MCDropout()), torch.randn(5, 3), draws=20)
        >>> bool((pred.epistemic > 0).all())
        True
    """

    rate: Rate | None = None
    before: Layers | None = None
    unit: Literal["element", "channel"] = "element"
    covers = ("matrix", "table", "norm", "dropout")
    builds: ClassVar[str] = "mc_dropout.DropoutPosterior"

    def targets(
        self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool
    ) -> set[str] | None:
        from slimbayes.posteriors.target_layers import chosen_layers, own_dropout

        if self.before is not None:
            return chosen_layers(
                f"MCDropout(before={self.before!r})",
                self.before,
                model,
                offered,
                scales=False,
            )
        return None if named else own_dropout(model, offered)

    def build(self, site: Site) -> Posterior:
        if site.kind == "table":
            raise ValueError(
                "MCDropout: an embedding is given word indices, of which none can be dropped. Use Mixture(components=2, "
                "assignment='input', zero=True, probs=(1 - rate, rate), draws='example'), which drops words."
            )
        return super().build(site)

    def describe(self) -> str:
        return f"MCDropout(rate={'own or 0.005' if self.rate is None else self.rate})"
