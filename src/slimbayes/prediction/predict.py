"""predict: run a model under many draws, batch by batch, in bounded memory.

Sizes: S draws, K members, N rows.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.engine.calls import Parallel
from slimbayes.engine.layout import arrays_of
from slimbayes.engine.noise import Seed
from slimbayes.engine.sharing import evaluating
from slimbayes.prediction import checks
from slimbayes.prediction.averages import Accumulator
from slimbayes.prediction.batches import batches_of
from slimbayes.prediction.distance import Distance, features_of
from slimbayes.prediction.draws import Draws, Networks
from slimbayes.prediction.prediction import Prediction
from slimbayes.prediction.sample import members
from slimbayes.train.elbo import check_finite
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named
from slimbayes.train.targets import broadcasts, check_positive

MOST_DRAWS = 1_000_000  # an average of more says nothing new, and would take for ever


@torch.no_grad()
def predict(
    model: nn.Module,
    x: Any,
    draws: int | Literal["exact"] | None = None,
    chunk: int | None = None,
    likelihood: LikelihoodName = "categorical",
    likelihood_std: float | Tensor = 0.0,
    keep_samples: bool = True,
    output: str | int | None = None,
    class_dim: int | None = None,
    share: bool = True,
    parallel: Parallel = "auto",
    inputs: int | None = None,
    seed: Seed = None,
    allow_nonfinite: bool = False,
    distance: Distance | None = None,
    progress: bool = False,
) -> Prediction:
    """Predict with uncertainty from S draws, in eval mode and without gradients.

    A function of model, inputs and seed. Each draw is one function, the same for all rows of all batches, so the draws
    of a prediction are joint over its rows; a row by itself is predicted as with draws of its own. Draw j depends on
    the seed and on j alone, not on `chunk`, the size or order of batches, or how many draws there are; it belongs to
    member j mod K. Every average is the plain mean over these S draws. (What a model draws by itself, past its
    posteriors, follows from the seed but differs with the shape of a batch.)

    Args:
        model: a converted model, or a part of one. Its training flags are restored afterwards; several threads may
            predict with it.
        x: a tensor or numpy array, a dict or tuple the model takes, a Dataset, or an iterable of batches (a
            DataLoader). Of batches (input, target) the targets are ignored.
        draws: S, the number of draws; by default K, one from each member. Where it is no multiple of K, some members
            have one draw more than others, and count so much more. "exact" runs every network that a model can be
            instead, once, and weighs each by its probability, as if there were infinitely many draws: for picks of few
            components (EMP with one to five layers of five); each network is then a member of the Prediction, with a
            weight. More than 4,096 networks, or draws that cannot be counted, are refused.
        chunk: at most so many rows (draws x inputs) in one forward; by default 2^15, or as many as have 2^23 input
            numbers.
        likelihood: what the outputs parameterise: "categorical" and "bernoulli" logits, "gaussian" means, or
            "heteroscedastic_gaussian" means and raw scales.
        likelihood_std: standard deviation of the observation noise, for "gaussian", without which `std` and `interval`
            are those of the mean alone; for "heteroscedastic_gaussian" that of the targets, as in training (1 if
            nothing is given, with a warning); a tensor for several targets, or (N, ...) for rows that have noise of
            their own.
        keep_samples: keep every draw's prediction. Without, memory does not grow with the number of draws.
        output: key or position of the outputs in what the model returns; by default the tensor itself, `.logits`, or
            the first tensor.
        class_dim: where `sample` has the classes, as in `categorical`: 2 for images (S, N, C, H, W). They come last in
            the Prediction.
        share: compute once what draws have in common: modules that run before any layer draws, and networks that
            several draws picked.
        parallel: as in `sample`.
        inputs: how many leading parts of a loader's batch the model takes; needed where a batch has more than (input,
            target).
        seed: a whole number or a torch.Generator; by default the next number of torch's own generator.
        allow_nonfinite: predict although inputs, weights or outputs are NaN or infinite, which is an error otherwise.
            Rows whose prediction is NaN then have the label -1.
        distance: what `slimbayes.distance` learned of the training examples. The uncertainty of predictions then grows
            away from them, and predictions say how far that is, in `distance`.
        progress: write a line to stderr that says how many rows are done.

    Members of an `Ensemble` are averaged with its stacking weights, if `stack` has set them.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2))
        >>> pred = predict(net, torch.randn(7, 4), draws=16)
        >>> pred.probs.shape, pred.samples.shape
        (torch.Size([7, 3]), torch.Size([16, 7, 3]))
    """
    checks.check_draws("predict", draws, parallel, also=("exact",))
    if chunk is not None and (not isinstance(chunk, Integral) or chunk < 1):
        raise ValueError(
            f"predict needs chunk >= 1, a whole number, got chunk={chunk!r}."
        )
    likelihood_std = (
        likelihood_std
        if isinstance(likelihood_std, (int, float))
        else torch.as_tensor(likelihood_std)
    )  # arrays and lists
    check_positive("likelihood_std", torch.as_tensor(likelihood_std), zero=True)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "The model has parameters on the meta device, which have no numbers: load its weights first."
        )
    if isinstance(draws, Integral) and draws > MOST_DRAWS:
        raise ValueError(
            f"predict takes at most {MOST_DRAWS:,} draws, got draws={draws!r}."
        )
    likelihood_named(likelihood)  # refuses an unknown one
    if distance is not None:
        distance.check(model)
    if not allow_nonfinite:
        check_finite(model)
    source = (Networks if draws == "exact" else Draws)(
        model, chunk, share, parallel, seed
    )
    number = members(model) if draws is None or draws == "exact" else int(draws)
    bar = Progress(x, progress)
    parts: list[Prediction] = []
    with evaluating(model):
        for args, kwargs in batches_of(model, x, chunk, inputs, allow_nonfinite):
            before, keep = sum(map(len, parts)), keep_samples or distance is not None
            sums = Accumulator(
                likelihood,
                source.predicted_members,
                likelihood_std,
                keep,
                class_dim,
                source.weights,
            )
            for outputs in source.outputs(args, kwargs, number):
                found = _checked(find_output(outputs, output), likelihood)
                if not before and not sums.count:
                    checks.check_scores(model, found, likelihood, class_dim)
                sums.likelihood_std = _std_of(likelihood_std, found, likelihood, before)
                sums.add(found)
            if not (allow_nonfinite or sums.sound()):
                again = (
                    find_output(outputs, output)
                    for outputs in source.outputs(args, kwargs, number)
                )
                checks.refuse_outputs(sums, again, before)
            part = Prediction(**sums.fields())
            if distance is not None:
                features = features_of(model, args, kwargs, distance.at)
                part = distance.widen(part, distance(features))
            parts.append(
                part if keep_samples else replace(part, by_draw=None, noise=None)
            )
            bar.add(len(part))
    bar.close()
    whole = Prediction.joined(parts)
    if (
        isinstance(likelihood_std, Tensor)
        and likelihood_std.dim() == whole.by_member.dim() - 1
        and len(likelihood_std) not in (1, len(whole))
    ):
        raise ValueError(
            f"likelihood_std has one line for each of {len(likelihood_std)} rows, but {len(whole)} were predicted."
        )
    return whole


@torch.no_grad()
def predict_prefixes(
    model: nn.Module,
    x: Tensor,
    draws: Sequence[int],
    likelihood: LikelihoodName = "categorical",
    likelihood_std: float | Tensor = 0.0,
    seed: Seed = None,
    before: int = 0,
    allow_nonfinite: bool = False,
) -> dict[int, Prediction]:
    """Predictions of one batch for several numbers of draws at the price of the largest: each is made of the first so
    many draws, the same that `predict` uses with that seed. Errors count rows on from `before`; `allow_nonfinite` lets
    inputs and outputs pass that are not finite.
    """
    if not draws or min(draws) < 1:
        raise ValueError(
            f"predict_prefixes needs numbers of draws of at least 1, got {draws!r}."
        )
    likelihood_named(likelihood)  # refuses an unknown one
    check_finite(model)
    if not allow_nonfinite:
        checks.check_inputs(model, ((x,), {}), before)
    out, done, source = {}, 0, Draws(model, None, True, "auto", seed)
    sums = Accumulator(
        likelihood, source.predicted_members, likelihood_std, True, None, source.weights
    )
    with evaluating(model):
        for count in sorted(set(draws)):
            for outputs in source.outputs((x,), {}, count - done, done):
                sums.add(find_output(outputs))
            out[count], done = Prediction(**sums.fields()), count
        if not allow_nonfinite and not sums.sound():
            checks.refuse_outputs(
                sums, map(find_output, source.outputs((x,), {}, done)), before
            )
    return out


def _checked(outputs: Tensor, likelihood: str) -> Tensor:
    """Refuse outputs that have no rows, or no numbers that a likelihood knows."""
    if outputs.dim() < (3 if likelihood == "categorical" else 2):
        what = (
            "Class scores need" if likelihood == "categorical" else "Predictions need"
        )
        raise ValueError(
            f"{what} a row axis: the draws gave {tuple(outputs.shape)}, without one. Give predict a batch, "
            f"such as x[None], or a model whose output has one row for each input; name it with output= if it has more."
        )
    if outputs.is_complex():
        raise ValueError(
            f"No likelihood takes complex outputs, and the model gave {outputs.dtype}: split them inside."
        )
    return outputs


def _std_of(
    likelihood_std: float | Tensor, outputs: Tensor, likelihood: str, before: int
) -> float | Tensor:
    """The noise of these rows, which come after so many others: one for all, or lines of one for each."""
    if not isinstance(likelihood_std, Tensor) or likelihood_std.numel() == 1:
        return likelihood_std
    each, rows = (
        likelihood_named(likelihood)
        .predictive(outputs[:1, :1], 1.0, None)[0]
        .shape[2:],
        outputs.shape[1],
    )
    if broadcasts(likelihood_std.shape, each) or broadcasts(
        likelihood_std.shape, (1, *each)
    ):
        return likelihood_std
    own = likelihood_std[before : before + rows]
    if (
        likelihood_std.dim() != len(each) + 1
        or not broadcasts(own.shape, (rows, *each))
        or len(own) != rows
    ):
        raise ValueError(
            f"likelihood_std of shape {tuple(likelihood_std.shape)} does not broadcast against one row's targets, "
            f"shape {tuple(each)}, nor has it a line for each row."
        )
    return own


def find_output(outputs: Any, output: str | int | None = None) -> Tensor:
    """The tensor of predictions in whatever a model returns."""
    if output is not None and isinstance(outputs, Tensor):
        raise ValueError(
            f"output={output!r} names one of several outputs, but the model returns one tensor: leave it out."
        )
    if output is not None:
        return (
            getattr(outputs, output)
            if isinstance(output, str) and hasattr(outputs, output)
            else outputs[output]
        )
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if logits is None and isinstance(outputs, dict):
        logits = outputs.get("logits")
    if logits is not None:
        return logits
    for leaf in arrays_of(outputs):
        if isinstance(leaf, Tensor):
            return leaf
    raise ValueError(
        f"No tensor found in the model's output of type {type(outputs).__name__}; name it with output=."
    )


_PAUSE = 0.2  # seconds between two lines


class Progress:
    """Rows that are done, of how many where that is known, and the time it takes.

    Args:
        x: what `predict` was given; its length, or its dataset's, is the number of rows.
        shown: whether anything is written.
    """

    def __init__(self, x: Any, shown: bool) -> None:
        rows = getattr(x, "dataset", x)
        many = hasattr(rows, "__len__") and not isinstance(rows, (dict, tuple, list))
        self.total = len(rows) if shown and many else None
        self.shown, self.done, self.start, self.told, self.width = (
            shown,
            0,
            time.monotonic(),
            0.0,
            0,
        )

    def add(self, rows: int) -> None:
        self.done += rows
        now = time.monotonic()
        if self.shown and (now - self.told > _PAUSE or self.done == self.total):
            self.told = now
            self._write(now - self.start)

    def close(self) -> None:
        if self.shown:
            self._write(time.monotonic() - self.start)
            sys.stderr.write("\n")

    def _write(self, seconds: float) -> None:
        of = (
            ""
            if not self.total
            else f" of {self.total:,} ({self.done / self.total:.0%})"
        )
        left = (
            f", {seconds * (self.total / self.done - 1):.0f} s left"
            if self.total and self.done < self.total
            else ""
        )
        line = f"predict: {self.done:,}{of} rows, {seconds:.1f} s{left}"
        sys.stderr.write(f"\r{line:{self.width}}")
        sys.stderr.flush()
        self.width = len(line)
