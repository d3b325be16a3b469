"""Prediction: averages, uncertainties and their decomposition from S draws of a model.

Probabilities are averaged, never logits, but they are kept as logarithms: a probability of e^-200 is zero in float32,
and so is 1 - p at a logit of 17. For classes the total uncertainty is an entropy, for real targets a variance; it is
the sum of an aleatoric and an epistemic part. Every average is the plain mean over the S draws that ran, unless members
have weights, say from `stack`: then each draw counts as much as its member weighs.

Sizes: S draws, K members, N rows, C classes.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch  # noqa: F401  the examples use it
from torch import Tensor

from slimbayes.errors import SlimbayesWarning
from slimbayes.prediction import averages, panels
from slimbayes.prediction.views import Views
from slimbayes.train.likelihoods import LIKELIHOODS, LikelihoodName

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(repr=False)
class Prediction(Views):
    """Predictions for N rows from S draws.

    Attributes:
        likelihood, count: what the samples parameterise, and S.
        by_member: log of each member's class probabilities, averaged over its draws (K, N, ..., C); of a binary target
            log(1 - p) and log p, so C = 2. For real targets the mean of its means (K, N, ...).
        aleatoric: uncertainty that stays if the weights were known: mean entropy in nats (N,), or noise variance.
        epistemic: uncertainty about the weights: mutual information (N,), or variance of the means (N, ...).
        by_draw: the same of every draw (S, N, ...), unless predict was asked not to keep them.
        noise: noise variance of every draw (S, N, ...), for real targets.
        weights: share (K,) of each member in every average here, or (K, N) where it differs between rows; None means
            equal ones. Where S is no multiple of K some members have one draw more, and with it a larger share. With
            fewer draws than members, K counts only those that had one.
        distance: how far each row is from the training rows (N,), from 0 to 1, if `predict` was given `distance`.

    Example:
        >>> p = Prediction.from_outputs(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]), "categorical")
        >>> p.probs
        tensor([[0.5000, 0.5000]])
        >>> torch.equal(p.total, p.aleatoric + p.epistemic)
        True
    """

    likelihood: str
    count: int
    by_member: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    by_draw: Tensor | None = None
    noise: Tensor | None = None
    weights: Tensor | None = None
    distance: Tensor | None = None

    @classmethod
    def from_outputs(
        cls,
        outputs: Tensor,
        likelihood: LikelihoodName = "categorical",
        members: int = 1,
        likelihood_std: float | Tensor = 0.0,
        class_dim: int | None = None,
        weights: Tensor | Sequence[float] | None = None,
    ) -> "Prediction":
        """Summarise raw model outputs.

        Shape: outputs (S, N, ..., C) logits, whose classes may lie along another `class_dim` but come last in the
        result (from five dimensions on it must be given: 2 for (S, N, C, H, W)); (S, N) or (S, N, 1) binary logits,
        (S, N, ...) means, or (S, N, ..., 2) means and raw scales. Draw j belongs to member j mod K. likelihood_std
        broadcasts against (N, ...), as in `predict`; weights (K,).

        Example:
            >>> Prediction.from_outputs(torch.tensor([[1.0], [5.0]]), "gaussian", members=2, weights=[0.75, 0.25]).mean
            tensor([2.])
        """
        draws = averages.Accumulator(
            likelihood,
            members,
            likelihood_std,
            keep=True,
            class_dim=class_dim,
            weights=weights,
        )
        draws.add(outputs)
        return cls(**draws.fields())

    @property
    def discrete(self) -> bool:
        """Whether targets are classes, not real numbers."""
        return LIKELIHOODS[self.likelihood].discrete

    @property
    def mean(self) -> Tensor:
        """Predictive mean: class probabilities (N, C), probability of class one (N,), or mean (N, ...)."""
        if self.discrete:
            return self._plain(self.log_probs)
        return averages.member_mean(self.by_member, self.weights)

    @property
    def member_mean(self) -> Tensor:
        """Class probabilities, or means, of each member, averaged over its draws: (K, N, ...)."""
        return self._plain(self.by_member)

    @property
    def probs(self) -> Tensor:
        """Predictive class probabilities (N, C); for binary targets (N, ...), the probability of class one."""
        self._need(discrete=True)
        return self.mean

    @property
    def log_probs(self) -> Tensor:
        """Logs of the predictive class probabilities (N, ..., C); of a binary target's two classes (N, ..., 2).

        Example:
            >>> Prediction.from_outputs(torch.tensor([[200.0]]), "bernoulli").log_probs
            tensor([[-200.,    0.]])
        """
        self._need(discrete=True)
        return averages.log_mean(self.by_member, self.weights)

    @property
    def member_probs(self) -> Tensor:
        """Class probabilities of each member, averaged over its draws: (K, N, C)."""
        self._need(discrete=True)
        return self.member_mean

    @property
    def samples(self) -> Tensor:
        """Probabilities or means of every draw, (S, N, ...)."""
        return self._plain(self._kept())

    @property
    def total(self) -> Tensor:
        """Total predictive uncertainty: aleatoric + epistemic, exactly."""
        return self.aleatoric + self.epistemic

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution in nats (N,): the total uncertainty about a class."""
        self._need(discrete=True)
        return self.total

    @property
    def variance(self) -> Tensor:
        """Predictive variance of a real target: the total uncertainty."""
        self._need(discrete=False)
        return self.total

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation of a real target."""
        return self.variance.sqrt()

    @property
    def label(self) -> Tensor:
        """Most probable class (N,); -1 where the probabilities are NaN (`predict(..., allow_nonfinite=True)`)."""
        logs = self.log_probs
        return logs.argmax(-1).masked_fill(logs.amax(-1).isnan(), -1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class (N,)."""
        return self.log_probs.amax(-1).exp()

    def log_prob(self, target: Tensor) -> Tensor:
        """Log predictive density of each target (the LPD): of the mixture of all draws, not the mean of their logs.

        Its negative mean is Eq. 14 of Dusenberry et al. 2020. A real target's dimensions get a density each (Table 13
        of Chang et al. 2019); they need the samples kept.

        Shape: target (N, ...) class indices, 0 or 1, or real values; returns (N, ...).

        Example:
            >>> p = Prediction.from_outputs(torch.tensor([[-1.0], [1.0]]), "gaussian", likelihood_std=1.0)
            >>> p.log_prob(torch.zeros(1))  # log of N(1; 0, 1)
            tensor([-1.4189])
        """
        return averages.log_mean(self.member_log_prob(target), self.weights)

    def member_log_prob(self, target: Tensor) -> Tensor:
        """Log probability, or density, of each target under every member's mixture of its own draws.

        Shape: target as in `log_prob`; returns (K, N, ...).
        """
        if self.discrete:
            target = self.check_target(target)
            return averages.log_at(self.by_member, target)
        logp = self.draw_log_prob(target)
        return averages.over_draws(logp, len(self.by_member), averages.log_mean)

    def draw_log_prob(self, target: Tensor) -> Tensor:
        """Log probability, or density, of each target under every draw by itself: what stacking weighs.

        Shape: target as in `log_prob`; returns (S, N, ...).

        Example:
            >>> p = Prediction.from_outputs(torch.zeros(3, 1, 4), "categorical")
            >>> p.draw_log_prob(torch.tensor([2])).T  # log of 1 / 4
            tensor([[-1.3863, -1.3863, -1.3863]])
        """
        target = self.check_target(target)
        values = self._kept()
        if self.discrete:
            return averages.log_at(values, target)
        assert self.noise is not None  # kept with the samples
        if bool((self.noise == 0).any()):
            raise ValueError(
                "A density needs observation noise, got likelihood_std 0; call predict(..., likelihood_std=) with its "
                "standard deviation."
            )
        return -0.5 * (
            (target - values).square() / self.noise
            + self.noise.log()
            + math.log(2 * math.pi)
        )

    def rescaled(self, mean: float | Tensor, std: float | Tensor) -> "Prediction":
        """The prediction in a target's own units, y = mean + std * f, for a model that was trained on (y - mean) / std.

        The output precision tau of Chang et al. 2019 (B.3) is in those units: `predict(..., likelihood_std=tau**-0.5 /
        std)`.

        Shape: mean and std are numbers, or broadcast against one row's targets.

        Example:
            >>> p = Prediction.from_outputs(torch.tensor([[-1.0], [1.0]]), "gaussian", likelihood_std=0.5)
            >>> p = p.rescaled(10.0, 2.0)
            >>> p.mean, p.epistemic, p.aleatoric
            (tensor([10.]), tensor([4.]), tensor([1.]))
        """
        self._need(discrete=False)
        given = {"mean": mean, "std": std}
        shift, factor = (
            averages.for_a_row(name, value, self.by_member)
            for name, value in given.items()
        )
        if not bool((factor > 0).all()):
            raise ValueError(f"std must be positive, got {std!r}.")
        square = factor.square()
        return replace(
            self,
            by_member=shift + factor * self.by_member,
            aleatoric=square * self.aleatoric,
            epistemic=square * self.epistemic,
            by_draw=None if self.by_draw is None else shift + factor * self.by_draw,
            noise=None if self.noise is None else square * self.noise,
        )

    def with_logs(self, by_draw: Tensor, aleatoric: Tensor) -> "Prediction":
        """The same with other log-probabilities of every draw (S, N, ..., C), of which so much is aleatoric."""
        by_member = averages.over_draws(by_draw, len(self.by_member), averages.log_mean)
        epistemic = averages.mutual_information(by_member, self.weights, aleatoric)
        return replace(
            self,
            by_draw=by_draw,
            by_member=by_member,
            aleatoric=aleatoric,
            epistemic=epistemic,
        )

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Central credible interval of the predictive distribution (real targets) or of the class probabilities.

        For real targets it is exact for the mixture of the draws with their noise; a warning says if there is none.

        Shape: two tensors of the shape of `mean`.

        Example:
            >>> Prediction.from_outputs(torch.zeros(3, 1), "gaussian", likelihood_std=1.0).interval(0.9)
            (tensor([-1.6449]), tensor([1.6449]))
        """
        averages.check_level(level)
        values, noise, ends = (
            self.samples,
            self.noise,
            ((1 - level) / 2, (1 + level) / 2),
        )
        if noise is not None and bool((noise > 0).any()):
            low, high = (
                averages.mixture_quantile(values, noise, self.weights, end)
                for end in ends
            )
        else:
            if not self.discrete:
                warnings.warn(
                    "This prediction has no observation noise: its intervals are those of the mean and hold fewer "
                    "targets than their level. Call predict(..., likelihood_std=) with the noise's standard deviation.",
                    SlimbayesWarning,
                    stacklevel=2,
                )
            low, high = (averages.quantile(values, self.weights, end) for end in ends)
        return low, high

    def plot(self, target: Tensor | None = None, x: Tensor | None = None) -> "Figure":
        """A picture: of real targets `slimbayes.plot.bands` over x, of classes the entropies of right and wrong rows.

        Shape: target as in `log_prob`; x (N,). Returns a matplotlib Figure.
        """
        return (
            panels.uncertainties(self, target)
            if self.discrete
            else panels.bands(self, x, target)
        )

    def _need(self, discrete: bool) -> None:
        """Refuse, as a name that is not there, what a prediction of classes, or of real targets, does not have."""
        if self.discrete != discrete:
            kinds = " or ".join(
                name
                for name, known in LIKELIHOODS.items()
                if known.discrete == discrete
            )
            raise AttributeError(
                f"This has likelihood {self.likelihood!r}; that needs {kinds}."
            )

    def _kept(self) -> Tensor:
        if self.by_draw is None:
            raise ValueError(
                "The samples were not kept; call predict(..., keep_samples=True)."
            )
        return self.by_draw

    def _plain(self, values: Tensor) -> Tensor:
        """Probabilities behind logs (..., C), of a binary target that of class one; means as they are."""
        if not self.discrete:
            return values
        return (values[..., 1] if self.likelihood == "bernoulli" else values).exp()
