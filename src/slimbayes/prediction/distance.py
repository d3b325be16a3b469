"""distance: how far an example is from the training examples, and predictions whose uncertainty grows away from them.

A Gaussian process with unit variance and a squared-exponential kernel, conditioned on training rows Z, has left at x

    v(x) = 1 - k(x, Z) (k(Z, Z) + noise I)^-1 k(Z, x)                     0 on the data, 1 far away from them

of its variance: the distance. It needs no targets and no training. From it follows a weight

    w(x) = (v(x) - m) / (1 - m), at least 0       m: median over Z of v at a row that is left out (closed form)

zero for half of all familiar rows and one far away. Real targets: what the model says of x is mixed with what is known
without looking at x, the distribution of the training targets,

    p(y | x) = (1 - w) p_model(y | x) + w N(y; mean, variance of the training targets)

Classes: the logits of each draw get a further variance, w times their own mean square, averaged over as MacKay (1992)
does: z / sqrt(1 + pi/8 w mean(z^2)), z centred. Either way the NLL is bounded far away, and what distance adds to the
uncertainty counts as epistemic.

Features are the model's inputs, or what reaches a layer inside it.

Sizes: N rows, M kept rows, P features, K members, S draws, C classes.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine import passes
from slimbayes.engine.sharing import evaluating
from slimbayes.engine.trial import on_trial
from slimbayes.errors import SlimbayesWarning, did_you_mean
from slimbayes.prediction.averages import unsqueeze_like
from slimbayes.prediction.batches import call_batch
from slimbayes.prediction.prediction import Prediction
from slimbayes.prediction.sample import fixed_draws, members, sample
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named

_TURNS = 2  # draws of each member: the same functions every time


def features_of(model: nn.Module, args: Any, kwargs: Any, at: str | None) -> Tensor:
    """What rows look like (N, P): the inputs themselves, or those of layer `at`, averaged over a few draws."""
    if at is None:
        return args[0].float()
    if any(passes.pass_of(p.key) is not None for p in passes.posteriors_of(model)):
        raise ValueError(
            f"The features of {at!r} belong to draws of their own: predict(..., distance=) outside `fixed_draws`."
        )
    names = dict(model.named_modules())
    if at not in names or not at:
        raise ValueError(
            f"distance(at={at!r}): the model has no such layer{did_you_mean(at, names)}"
        )
    seen = _seen(model, args, kwargs, {at: names[at]})
    if not seen or any(x.dim() != 2 or x.shape != seen[0][1].shape for _, x in seen):
        got = "nothing" if not seen else f"shape {tuple(seen[0][1].shape)}"
        raise ValueError(
            f"distance needs a layer whose inputs are one line of features for each row, (N, P); at={at!r} got {got}."
        )
    return torch.stack([x for _, x in seen]).mean(0)


def _seen(
    model: nn.Module, args: Any, kwargs: Any, modules: dict[str, nn.Module]
) -> list[tuple[str, Tensor]]:
    """Inputs of these modules, in the order of their calls, under a few draws that are always the same."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str) -> Any:
        return lambda module, inputs: (
            None if on_trial() else found.append((name, inputs[0].detach().float()))
        )

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(module.register_forward_pre_hook(note(name)))
        if not passes.posteriors_of(model):
            model(*args, **kwargs)
        else:
            stack.enter_context(fixed_draws(model, _TURNS * members(model), seed=0))
            sample(model, *args, parallel=False, **kwargs)
    return found


_NOISE = 0.1  # of the process: rows closer than this tells apart say no more than one of them
_SCALE = 1.5  # median distance between rows, in length scales of the kernel


class Distance(nn.Module):
    """Distances from training rows, and the predictions they change; `distance` makes one.

    It is a module with buffers alone: `.to`, copies and pickles work.

    Args:
        rows: features of training rows (M, P), M >= 2.
        marginal: means and variances of real targets (2, ...); of classes nothing is needed, (0,).
        at: where the features come from, as in `distance`.
    """

    shift: Tensor
    stretch: Tensor
    rows: Tensor
    root: Tensor
    typical: Tensor
    marginal: Tensor
    norms: Sequence[
        float
    ] = ()  # of all parameters of the model that features come from

    def __init__(self, rows: Tensor, marginal: Tensor, at: str | None) -> None:
        super().__init__()
        self.at = at
        wide = rows.double()
        varies = wide.amax(0) > wide.amin(0)
        shift, stretch = wide.mean(0), wide.std(0).where(varies, 1.0)
        z = (wide - shift) / stretch
        length = float(torch.pdist(z[:512]).median()) / _SCALE or 1.0
        stretch, z = stretch * length, z / length
        chol = torch.linalg.cholesky(
            _kernel(z, z) + _NOISE * torch.eye(len(z), dtype=z.dtype, device=z.device)
        )
        root = torch.linalg.solve_triangular(
            chol, torch.eye(len(z), dtype=z.dtype, device=z.device), upper=False
        )
        left_out = (
            1 / root.square().sum(0) - _NOISE
        )  # variance at each row given the others
        buffers = {
            "shift": shift,
            "stretch": stretch,
            "rows": z,
            "root": root,
            "typical": left_out.median(),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value.float())
        self.register_buffer("marginal", marginal.double())

    def check(self, model: nn.Module) -> None:
        """Warn where features come from other weights than those that distances were learned with."""
        now = self.norms if self.at is None or not self.norms else _norms(model)
        if len(now) != len(self.norms) or not all(
            map(partial(math.isclose, rel_tol=1e-3), now, self.norms)
        ):
            why = f"distance learned from what reaches {self.at!r} in a network with other weights: call it again"
            warnings.warn(
                f"{why} after training. Its distances say nothing about this one.",
                SlimbayesWarning,
                3,
            )

    def forward(self, features: Tensor) -> Tensor:
        """Distance of rows with these features, from 0 (among the training rows) to 1: (N, P) to (N,)."""
        z = (features.to(self.shift) - self.shift) / self.stretch
        return 1 - (_kernel(z, self.rows) @ self.root.T).square().sum(-1).clamp(0, 1)

    def widen(self, prediction: Prediction, distance: Tensor) -> Prediction:
        """A prediction that knows less the farther its rows are; the samples must have been kept.

        Shape: distance (N,).
        """
        if prediction.by_draw is None:
            raise ValueError(
                "Distance changes every draw; call predict(..., keep_samples=True)."
            )
        w = (
            ((distance - self.typical) / (1 - self.typical))
            .clamp(0, 1)
            .to(prediction.by_member)
        )
        wider = self._classes if prediction.discrete else self._targets
        return replace(
            wider(prediction, prediction.by_draw, w), distance=distance.to(w)
        )

    def _classes(self, prediction: Prediction, logs: Tensor, w: Tensor) -> Prediction:
        z = logs.clamp_min(torch.finfo(logs.dtype).min / logs.shape[-1])
        z = z - z.mean(-1, keepdim=True)
        # Of huge logits squares overflow: sqrt(1 + a q^2) = hypot(1, sqrt(a) q).
        largest = z.abs().amax(-1, keepdim=True).clamp_min(1.0)
        rms = largest * (z / largest).square().mean(-1, keepdim=True).sqrt()
        further = (
            unsqueeze_like((math.pi / 8 * w).sqrt(), prediction.aleatoric)[
                None, ..., None
            ]
            * rms
        )
        logs = torch.where(
            further > 0,
            (z / torch.hypot(torch.ones_like(further), further)).log_softmax(-1),
            logs,
        )
        return prediction.with_logs(logs, prediction.aleatoric)

    def _targets(self, prediction: Prediction, values: Tensor, w: Tensor) -> Prediction:
        """With the distribution of the training targets as one more member, whose weight differs between rows."""
        if self.marginal.shape[1:] != values.shape[2:]:
            raise ValueError(
                f"distance was fitted to targets of shape {tuple(self.marginal.shape[1:])} for each row, the prediction "
                f"has {tuple(values.shape[2:])}: give distance the targets and the likelihood that predict is given."
            )
        mean, variance = self.marginal.to(values)
        k, row = len(prediction.by_member), unsqueeze_like(w, prediction.aleatoric)
        shares = (
            torch.full((k,), 1 / k).to(w)
            if prediction.weights is None
            else prediction.weights.to(w)
        )
        total = (
            (1 - row) * prediction.total
            + row * variance
            + row * (1 - row) * (prediction.mean - mean).square()
        )
        aleatoric = (1 - row) * prediction.aleatoric
        assert prediction.noise is not None  # kept with the samples
        return replace(
            prediction,
            count=prediction.count + prediction.count // k,
            by_member=torch.cat(
                [prediction.by_member, mean.expand(1, *prediction.by_member.shape[1:])]
            ),
            aleatoric=aleatoric,
            epistemic=(total - aleatoric).clamp_min(0),
            by_draw=_with_member(values, mean, k),
            noise=_with_member(prediction.noise, variance, k),
            weights=torch.cat([shares[:, None] * (1 - w), w[None]]),
        )


def distance(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: LikelihoodName = "categorical",
    at: str | None = None,
    rows: int = 1024,
    inputs: int | None = None,
    seed: int = 0,
) -> Distance:
    """Learn from training rows what is near, in one pass and without training; for `predict(..., distance=)`.

    Args:
        model: a converted model, trained.
        loader: batches (input, target) of the training set, such as `[(x, y)]`; of classes the targets do not matter.
        likelihood: as in `predict`.
        at: name of a layer, whose inputs are the features. By default the model's own inputs if they are a table
            (N, P); otherwise the inputs of the last linear layer.
        rows: at most so many rows are kept, drawn evenly from all. A prediction takes rows^2 products for each row.
        inputs: as in `predict`.
        seed: for the choice of rows.

    Example:
        >>> import slimbayes as sb
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> net = sb.bayesianize(nn.Linear(2, 1), sb.Rank1(members=2))
        >>> near = distance(net, [(x, x[:, :1])], likelihood="gaussian")
        >>> how = {"likelihood": "gaussian", "likelihood_std": 0.1}
        >>> pred = sb.predict(net, torch.tensor([[0.0, 0.0], [9.0, 9.0]]), distance=near, **how)
        >>> pred.distance.round(decimals=1), bool(pred.epistemic[1] > 0.5)
        (tensor([0., 1.]), True)
    """
    if rows < 2:
        raise ValueError(f"distance needs rows >= 2, got {rows!r}.")
    discrete = likelihood_named(likelihood).discrete
    if discrete and isinstance(loader, Tensor):
        raise TypeError(
            "distance takes batches, such as [(x, y)], got a tensor, whose rows are none."
        )
    generator = torch.Generator().manual_seed(seed)
    kept: Tensor | None = None
    order, moments = torch.empty(0), list[Tensor]()  # a random number for each row kept
    with torch.no_grad(), evaluating(model):
        for batch in loader:
            if not (discrete or (isinstance(batch, (tuple, list)) and len(batch) > 1)):
                raise TypeError(
                    f"distance of real targets needs batches (input, target), got {type(batch).__name__}."
                )
            args, kwargs = call_batch(model, batch, inputs)
            first = args[0] if len(args) == 1 and not kwargs else None
            if at is None and not (
                isinstance(first, Tensor)
                and first.dim() == 2
                and first.is_floating_point()
            ):
                at = _last_linear(model, args, kwargs)
            features = features_of(model, args, kwargs, at)
            kept = features if kept is None else torch.cat([kept, features])
            order = torch.cat([order, torch.rand(len(features), generator=generator)])
            if len(order) > 2 * rows:
                kept, order = _smallest(kept, order, rows)
            if not discrete:
                y = torch.as_tensor(batch[-1]).double()
                moments.append(
                    torch.stack(
                        [
                            torch.full_like(y[0], len(y)),
                            y.mean(0),
                            y.var(0, correction=0),
                        ]
                    )
                )
    if kept is None or len(kept) < 2:
        raise ValueError(
            f"distance needs at least two rows to learn from, got {len(order)}."
        )
    kept, _ = _smallest(kept, order, rows)
    if not bool(kept.isfinite().all()):
        raise ValueError(
            "distance was given features that are NaN or infinite: clean the inputs first."
        )
    found = Distance(kept, _marginal(moments) if moments else torch.empty(0), at).to(
        kept.device
    )
    if not bool(found.marginal.isfinite().all()):
        raise ValueError(
            "distance was given targets that are NaN or infinite: leave their rows out."
        )
    found.norms = _norms(model)
    return found


def _last_linear(model: nn.Module, args: Any, kwargs: Any) -> str:
    """The name of the linear layer that is called last."""
    linear: Any = {
        n: m for n, m in model.named_modules() if n and isinstance(m, nn.Linear)
    }
    seen = _seen(model, args, kwargs, linear)
    if not seen:
        raise ValueError(
            "distance found no linear layer inside the model that is called: name one with at=."
        )
    return seen[-1][0]


def _smallest(kept: Tensor, order: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows with the smallest numbers: of random ones an even sample, however many batches there were."""
    first = order.argsort()[:count]
    return kept[first.to(kept.device)], order[first]


def _marginal(moments: Sequence[Tensor]) -> Tensor:
    """Mean and variance (2, ...) of all targets from the count, mean and variance (3, ...) of every batch's: squares of
    large targets would lose their digits.
    """
    count, means, within = torch.stack(list(moments), 1)
    mean = (count * means).sum(0) / count.sum(0)
    variance = (count * (within + (means - mean).square())).sum(0) / count.sum(0)
    return torch.stack([mean, variance.clamp_min(torch.finfo(torch.float32).tiny)])


def _norms(model: nn.Module) -> Any:
    return torch.stack(
        torch._foreach_norm([p.detach().float() for p in model.parameters()])
    ).tolist()


def _with_member(values: Tensor, known: Tensor, members: int) -> Tensor:
    """Draws (S, N, ...), draw j of member j mod K, with one more member that always says the same."""
    further = known.expand(1, *values.shape[1:])
    parts = []
    for turn in values.split(members):
        parts += [turn, further] if len(turn) == members else [turn]
    return torch.cat(parts)


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    # By products the distances of close rows would be rounded, those of far ones infinity less infinity.
    return torch.exp(
        -0.5 * torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
    )
