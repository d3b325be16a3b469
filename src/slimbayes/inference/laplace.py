"""Laplace approximation in one pass over the data: a Gaussian around a trained network (MacKay 1992; Daxberger et al.
2021), over the rank-1 factors of its layers or over their weights.

    q = Normal(means, (H + lambda)^-1)      H: the generalised Gauss-Newton matrix of each layer by itself

The weights W stay. Factors are few beside them, so that H is whole within a layer, where a Laplace approximation of W
has to cut corners.

A prior around one cannot be tuned by the marginal likelihood: a trained network lies there already, so that the
evidence always votes for no posterior at all. Tuned priors have mean zero, as those of weights have, and come out wide.
That is best for real targets, if predictions are linearised; for classes Normal(1, 0.15) is better by far, hence the
defaults (docs/fine_tuning.md has the numbers).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.convert.bayesianize import (
    Conversion,
    bayesianize,
    debayesianize,
    decisions_of,
    restate,
)
from slimbayes.convert.plan import Decision, Selection, plan
from slimbayes.distributions.families import Normal
from slimbayes.engine import passes
from slimbayes.engine.locate import unwrapped
from slimbayes.inference.curvature import NO_TARGETS, Curvature, sum_curvature
from slimbayes.inference.evidence import CurvatureSpectrum, maximise
from slimbayes.inference.means import fit_k_tied, plain_model, set_factors
from slimbayes.posteriors.configs.base import check_choice
from slimbayes.posteriors.configs.rank1 import JointNormal, Over
from slimbayes.prediction.batches import labelled_batches
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named

Structure = Literal["full", "kronecker", "diagonal", "k-tied"]


@dataclass(frozen=True)
class Laplace:
    """What `laplace` found; the model itself carries the posterior.

    Attributes:
        model: the converted model.
        log_evidence: marginal likelihood of all targets, in nats; with several members their average.
        log_likelihood: of all targets at the means.
        likelihood_std: standard deviation of the targets' noise, for predictions; 0 for other likelihoods.
        prior_precision: of each layer, by name.
    """

    model: nn.Module = field(repr=False)
    log_evidence: float
    log_likelihood: float
    likelihood_std: float
    prior_precision: dict[str, float]


def laplace(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: LikelihoodName = "categorical",
    over: Over | None = None,
    include: Selection = None,
    exclude: Selection = None,
    layers: Literal["all", "last"] = "all",
    structure: Structure = "full",
    prior: Normal | Literal["layer", "shared"] | None = None,
    likelihood_std: float | None = None,
    full_up_to: int = 1024,
    rank: int = 2,
    samples: int | None = None,
    output: str | int | None = None,
) -> Laplace:
    """Give a trained network a Gaussian posterior in one pass over its training data; its weights stay as they are.

    The model is then an ordinary converted one, in place: `sample`, `predict`, `save` and `summary` work.
    `predict_linearised` is the predictive of the network's linearisation, without sampling. Real targets need it: with
    priors by evidence factors that undo each other are as wide as the prior, and sampled their products are too small
    (means of a linear layer by a quarter). `prior=Normal(1.0, 0.2)` can be sampled (docs/fine_tuning.md).

    Args:
        model: a plain model in eval mode, or a converted one, whose means are taken: factors of all members of rank-1
            methods, or the weights of mean-field ones.
        loader: batches (inputs, targets), or mappings with "labels".
        likelihood: what the outputs parameterise, as in `predict`.
        over: "both" rank-1 factors, by default for classes; "both+bias" with the layer's bias, by default for others;
            "r" (outputs) or "s" (inputs) alone; or the "weights" and biases themselves.
        include, exclude: which layers, as in `bayesianize`.
        layers: "last" takes the layer that runs last alone.
        structure: "full" covariances within each layer; "kronecker" products of two small ones, for weights;
            "diagonal"; or "k-tied", a `KTied` posterior over the weights whose scales of low rank are fitted to the
            diagonal.
        prior: a Normal for every number; or one of mean zero whose precision maximises the marginal likelihood, for
            each "layer" or "shared" by all. By default Normal(1, 0.15) for factors under a likelihood of classes, else
            "layer".
        likelihood_std: standard deviation of the targets' noise for "gaussian"; by default the one of most evidence.
            For "heteroscedastic_gaussian" that of the targets, as in training; by default 1.
        full_up_to: layers with more numbers than that get a Kronecker product of weights, or a diagonal of factors;
            `summary` says which.
        rank: k of "k-tied".
        samples: draw so many targets for each row from the model instead of exact information about all outputs: for
            many classes or positions.
        output: which output, as in `predict`.

    Raises:
        ValueError: the model trains, targets are missing, curvature is singular, or a precision runs away. The model
            is then as it was.
        FloatingPointError: curvature is NaN or infinite.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
        >>> data = [(torch.randn(20, 4), torch.randint(3, (20,)))]
        >>> fit = sb.laplace(net, data)
        >>> sb.predict(net, torch.randn(5, 4), draws=10).probs.shape, sorted(fit.prior_precision)
        (torch.Size([5, 3]), ['0', '2'])
    """
    discrete = likelihood_named(likelihood).discrete
    over = over or ("both" if discrete else "both+bias")
    _check(
        model,
        prior,
        likelihood_std,
        samples,
        layers=layers,
        structure=structure,
        over=over,
    )
    given, model = model, unwrapped(model)
    weights = over == "weights" or structure == "k-tied"
    if prior is None:
        prior = Normal(1.0, 0.15) if discrete and not weights else "layer"
    start = prior if isinstance(prior, Normal) else Normal(0.0, 1.0)
    numbers: Over = "weights" if weights else over
    work, means, said = plain_model(model)
    if weights and means:
        problem = "laplace over weights needs a plain model, but this one has factors"
        raise ValueError(f"{problem}: call materialize(model, member=0) first.")
    if means and (include is not None or exclude is not None or layers != "all"):
        raise ValueError(
            "laplace: include, exclude and layers choose among a plain model's layers; this one's are set."
        )
    config = JointNormal(
        over=numbers,
        members=next((len(f.r) for sites in means.values() for f in sites.values()), 1),
        prior=start,
        full_up_to=full_up_to if structure == "full" else 0,
        beyond="kronecker"
        if over == "weights" and structure in ("full", "kronecker")
        else "independent",
    )
    batches = iter(labelled_batches(work, loader))
    try:
        if layers == "last":
            first = next(batches, None)
            if first is None:
                raise ValueError(NO_TARGETS)
            free, decisions = (
                include is None and exclude is None,
                plan(work, config, include, exclude),
            )
            include, batches = (
                _last(work, decisions, first, free),
                chain([first], batches),
            )
        bayesianize(
            work,
            config,
            include=(lambda name, _: name in means) if means else include,
            exclude=exclude,
        )
        restate(said, work)
        set_factors(work, means)
        spread = (
            likelihood_std
            if likelihood == "heteroscedastic_gaussian" and likelihood_std is not None
            else 1.0
        )
        curvature = sum_curvature(work, batches, likelihood, samples, output, spread)
        report = _fit(work, config, curvature, likelihood, prior, likelihood_std)
        if structure == "k-tied":
            fit_k_tied(work, rank)
    except BaseException:
        debayesianize(work)
        raise
    if work is not model:
        _move(work, model)
        restate(said, model)
    return replace(report, model=given)


def _check(
    model: nn.Module,
    prior: object,
    likelihood_std: float | None,
    samples: int | None,
    **choices: str,
) -> None:
    known = {
        "layers": ("all", "last"),
        "structure": ("full", "kronecker", "diagonal", "k-tied"),
        "over": ("both", "both+bias", "r", "s", "weights"),
    }
    for name, value in choices.items():
        check_choice("laplace", name, value, known[name])
    if choices["structure"] == "kronecker" and choices["over"] != "weights":
        raise ValueError(
            f"laplace: a Kronecker product is of weights: structure='kronecker' needs over='weights', got "
            f"{choices['over']!r}."
        )
    if not isinstance(prior, Normal) and prior not in ("layer", "shared", None):
        raise ValueError(
            f'laplace: prior must be a Normal, "layer" or "shared", got {prior!r}.'
        )
    if likelihood_std is not None and not 0 < likelihood_std < math.inf:
        raise ValueError(
            f"laplace: likelihood_std must be positive, got {likelihood_std!r}."
        )
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ValueError(
            f"laplace: samples must be a whole number of at least 1, or None, got {samples!r}."
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "laplace needs all weights in memory, but some of the model's are elsewhere (device 'meta', offloaded): "
            "load it without offloading."
        )
    training = next((name for name, m in model.named_modules() if m.training), None)
    if training is not None:
        raise ValueError(
            f"laplace needs the network as it predicts, but {training or 'the model'} is in training mode, where "
            f"dropout and batch norm change its outputs: call model.eval() first."
        )


def _last(
    model: nn.Module,
    decisions: list[Decision],
    batch: tuple[Any, Any, Tensor],
    free: bool,
) -> str:
    """The name of the layer to be converted that runs last, as a pattern; where the user was `free` to leave none out,
    it must be the last of all that have a matrix.
    """
    ran: list[Decision] = []
    with ExitStack() as hooks, torch.no_grad():
        for d in decisions:
            layer = model.get_submodule(d.name)
            if d.config is not None or (
                free and any(p.dim() > 1 for p in layer.parameters())
            ):
                hooks.enter_context(
                    layer.register_forward_hook(lambda *_, d=d: ran.append(d))
                )
        model(*batch[0], **batch[1])
    last = ran[-1]
    if last.config is None:
        raise ValueError(
            f'laplace: the layer that runs last, {last.name}, cannot be the one of layers="last": {last.reason}. Name '
            f"another one with include=, or untie the weights."
        )
    return re.escape(last.name)


def _fit(
    model: nn.Module,
    config: JointNormal,
    curvature: Curvature,
    likelihood: LikelihoodName,
    prior: Normal | Literal["layer", "shared"],
    likelihood_std: float | None,
) -> Laplace:
    """Choose precisions and noise, and give every posterior its covariance and its prior."""
    joints: list[Any] = passes.posteriors_of(model)
    scaled = (
        likelihood == "gaussian"
    )  # one noise for all; a heteroscedastic head has its own
    spectra = []
    for p, block in zip(joints, curvature.blocks, strict=True):
        far = (p.means().detach().double() - p.locs()).square().sum()
        spectra.append(
            CurvatureSpectrum(p.name, block.spectrum(), float(far) / p.members)
        )
    given = (
        [float(prior.scale) ** -2] * len(joints) if isinstance(prior, Normal) else None
    )
    groups = [0 if prior == "shared" else id(p.layer) for p in joints]
    best = maximise(
        spectra,
        curvature.log_likelihood,
        curvature.targets,
        likelihood_std,
        scaled,
        given,
        groups,
    )
    variance, fits = (
        best.noise**2 if scaled else 1.0,
        list(zip(joints, curvature.blocks, best.precisions, strict=True)),
    )
    told: dict[
        int, list[int | None]
    ] = {}  # sites of a layer share a config, and so the number of directions
    for p, block, precision in fits:
        if p.correlated:
            told.setdefault(id(p.layer), []).append(
                block.directions(variance, precision)
            )
    for p, block, precision in fits:
        own = told.get(id(p.layer), [None])
        block.fit(
            variance,
            precision,
            None if None in own else max(n for n in own if n is not None),
        )
        p.prior = Normal(p.prior.loc, precision**-0.5)
    layer: Any
    for _, layer, d in decisions_of(
        model
    ):  # into configs, which `save` records; sites of one layer share theirs
        if d.config is not None:
            found = list(layer.posterior.values())
            counts = [p.directions.shape[2] for p in found if p.directions is not None]
            d.config = replace(
                config, prior=found[0].prior, directions=next(iter(counts), None)
            )
    precisions = {
        p.layer.bayes_name: precision
        for p, precision in zip(joints, best.precisions, strict=True)
    }
    return Laplace(
        model,
        best.log_evidence,
        best.log_likelihood,
        best.noise if scaled else 0.0,
        precisions,
    )


def _move(work: nn.Module, model: nn.Module) -> None:
    """Convert a model as its copy was, and take over the copy's posteriors."""
    debayesianize(model)
    conversion: Conversion = work.__dict__["_slimbayes"]
    bayesianize(
        model,
        {
            re.escape(d.name): d.config
            for d in conversion.decisions
            if d.config is not None
        },
    )
    state = {n: t for n, t in work.state_dict().items() if ".posterior." in f".{n}"}
    model.load_state_dict(state, strict=False)
    for p in passes.posteriors_of(model):
        p.fitted = True  # as the copy's were
