"""What to know about a fit before it is trusted: does the prior or the data decide, has the posterior moved, do its
draws differ, and how far is it from the true one?

    KL against NLL      both per datum, as they stand in the loss
    at the prior        elements whose location and scale are both within a tenth of the prior's scale of the prior's
    collapsed           elements whose scale is below a thousandth of the prior's
    label changes       rows that one draw labels otherwise than another
    k-hat               psis.py, from a few rows, whose log-likelihood stands for that of all data

Sizes: S draws, K members, B rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.diagnostics.psis import KHat, k_hat
from slimbayes.engine.passes import posteriors_of
from slimbayes.engine.sharing import evaluating
from slimbayes.prediction.sample import members, sample
from slimbayes.train.elbo import dwarfed, kl
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named

_NEAR, _NOTHING = 0.1, 1e-3  # of the prior's scale
_DRAWS, _TAIL_DRAWS = 8, 50  # of each member
_ROWS = 512  # that a forward has at most, if one draw of each member has no more
_FEW = 300  # elements beyond which a large k-hat is the rule


@dataclass(frozen=True)
class Check:
    """What `check` found. `str()` gives a few lines, `to_dict()` plain data; nan where there is no such thing.

    Attributes:
        nll, kl: per datum; kl_weight: what the KL was multiplied with in training.
        at_prior, collapsed: shares of the posterior's `elements`.
        label_changes: share of rows whose label is not the same under all draws.
        k_hat: None where it cannot be had; `k_hat_note` says why.
    """

    nll: float
    kl: float
    kl_weight: float = 1.0
    elements: int = 0
    at_prior: float = math.nan
    collapsed: float = math.nan
    label_changes: float = math.nan
    k_hat: KHat | None = None
    k_hat_note: str = ""

    @property
    def warnings(self) -> list[str]:
        """A sentence with a remedy for each thing that looks wrong."""
        told = [dwarfed(self.kl_weight * self.kl) or ""]
        if self.at_prior > 0.5:
            told.append(
                f"{self.at_prior:.0%} of the posterior is still at its prior: the data did not move it, so the prior "
                f"says how much draws differ. That is well where they predict no worse than the plain network (factors "
                f"beside weights that learn); else lower the KL's weight, or start from smaller scales."
            )
        if self.collapsed > 0.5:
            told.append(
                f"{self.collapsed:.0%} of the posterior's scales have collapsed: its draws hardly differ. Raise the "
                f"KL's weight or scale_init."
            )
        if self.label_changes > 0.5:
            told.append(
                f"Draws disagree on the label of {self.label_changes:.0%} of the rows: one draw says little. Train "
                f"longer, or predict with more draws."
            )
        if self.k_hat is not None and self.elements <= _FEW and self.k_hat.k > 0.7:
            told.append(
                f"k-hat is {self.k_hat.k:.2f}: the posterior misses mass of the true one. Try a richer family, or more "
                f"members."
            )
        return [said for said in told if said]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the warnings."""
        shape = None if self.k_hat is None else self.k_hat.k
        return vars(self) | {"k_hat": shape, "warnings": self.warnings}

    def __str__(self) -> str:
        return "\n".join(lines(self.to_dict()))


def lines(found: dict[str, Any], scaled: bool = False) -> list[str]:
    """A check's plain data in lines of less than 80 characters, warnings aside; `scaled` says that the network's
    targets were, so that the NLL is not in the units of others.
    """
    out = [
        f"NLL {found['nll']:.4f}{' of scaled targets' * scaled}, KL {found['kl']:.4f} per datum"
    ]
    if not math.isnan(found["at_prior"]):
        out.append(
            f"posterior {found['at_prior']:.0%} at its prior, {found['collapsed']:.0%} collapsed"
        )
    if not math.isnan(found["label_changes"]):
        out.append(
            f"draws change the label of {found['label_changes']:.1%} of the rows"
        )
    shape, note = found.get("k_hat"), found.get("k_hat_note", "")
    if shape is not None or note:
        out.append(f"k-hat {'none' if shape is None else f'{shape:.2f}'}: {note}")
    return out


@torch.no_grad()
def check(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    likelihood: LikelihoodName = "categorical",
    likelihood_std: float | Tensor = 1.0,
    num_data: int | None = None,
    kl_weight: float = 1.0,
    unseen: Tensor | None = None,
) -> Check:
    """Look at a trained model, with some hundred rows: KL, NLL, shares of the posterior, label changes and k-hat.

    Its noise comes from torch's default generators. It costs about 60 forwards of `x` for each member.

    Args:
        model: a converted model; it is run in eval mode.
        x, y: training rows; as many as shall stand for all, 128 say.
        likelihood, likelihood_std: as in `predict`.
        num_data: how many training rows there are; as many as in `x` by default.
        kl_weight: what the KL was multiplied with at the end of training.
        unseen: inputs whose labels are compared between draws; `x` by default.

    Shape: x (B, ...), y (B,) or (B, T).

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.MeanField(scale_init=1e-5, scale_jitter=0.0))
        >>> found = check(net, torch.randn(20, 4), torch.arange(20) % 3)
        >>> found.elements, found.collapsed, len(found.warnings) > 0
        (12, 1.0, True)
    """
    with evaluating(model):
        total, meaning = num_data or len(x), likelihood_named(likelihood)
        nll = float(
            meaning.nll(_outputs(model, x).float(), y, "average", likelihood_std)
        )
        shares = _shares(model)
        shape, note = _k_hat(model, x, y, likelihood, likelihood_std, total, shares[0])
        changes = _label_changes(model, x if unseen is None else unseen, likelihood)
        return Check(
            nll, float(kl(model)) / total, kl_weight, *shares, changes, shape, note
        )


def _shares(model: nn.Module) -> tuple[int, float, float]:
    """How many elements of the posterior have a prior of their own, and which share is at it or collapsed."""
    count, near, nothing = 0, 0.0, 0.0
    for posterior in posteriors_of(model):
        for offset, ratio in posterior.against_prior():
            count += ratio.numel()
            near += float(((offset.abs() < _NEAR) & ((ratio - 1).abs() < _NEAR)).sum())
            nothing += float((ratio < _NOTHING).sum())
    return (count, near / count, nothing / count) if count else (0, math.nan, math.nan)


def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs of some draws of every member, (S, B, ...), a few at a time."""
    return torch.cat([sample(model, x) for _ in range(_DRAWS)])


def _label_changes(model: nn.Module, x: Tensor, likelihood: LikelihoodName) -> float:
    if not likelihood_named(likelihood).discrete or not posteriors_of(model):
        return math.nan
    outputs = _outputs(model, x)
    labels = outputs.argmax(-1) if likelihood == "categorical" else outputs > 0
    return float((labels != labels[:1]).any(0).float().mean())


def _k_hat(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    likelihood: LikelihoodName,
    likelihood_std: float | Tensor,
    total: int,
    elements: int,
) -> tuple[KHat | None, str]:
    meaning = likelihood_named(likelihood)

    def log_likelihood(held: nn.Module) -> Tensor:
        outputs = sample(held, x).float()
        return (
            -total
            * torch.stack(
                [
                    meaning.nll(one[None], y, "average", likelihood_std)
                    for one in outputs
                ]
            ).double()
        )

    if not posteriors_of(model):
        return None, "there is no posterior"
    if not elements:
        return None, "the density of its draws is not known"
    try:
        draws, chunk = _TAIL_DRAWS * members(model), max(1, _ROWS // len(x))
        found = k_hat(model, log_likelihood, draws, chunk)
    except TypeError:
        return None, "the density of some of its draws is not known"
    except ValueError as error:
        return None, str(error)
    usual = found.verdict != "reliable" and elements > _FEW
    return (
        found,
        f"{found.verdict}, as is usual with {elements:,} elements"
        if usual
        else found.verdict,
    )
