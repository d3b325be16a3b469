"""The config of batch norm whose members keep apart; posteriors/member_norm.py says what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slimbayes.posteriors.checks import check_count
from slimbayes.posteriors.configs.base import SiteConfig

if TYPE_CHECKING:
    from torch import nn


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

    members: int = 4
    affine: bool = False
    builds: ClassVar[str] = "member_norm.MemberNormPosterior"

    def __post_init__(self) -> None:
        check_count(self, "members", self.members)

    covers = ("norm",)

    def targets(self, model: nn.Module, offered: Mapping[str, nn.Module], named: bool) -> set[str] | None:
        from slimbayes.posteriors.member_norm import batch_norms

        return batch_norms(offered)

    def leaves_alone(self, layer: nn.Module) -> str:
        from slimbayes.posteriors.member_norm import why_not

        return why_not(layer)

    def describe(self) -> str:
        return f"MemberNorm(members={self.members}{', affine' if self.affine else ''})"
