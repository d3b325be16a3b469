"""Stacking: weights of predictive distributions that make held-out data most probable (Yao et al. 2018).

    stacking_weights   max over w of  sum_n log sum_s w_s p_s(y_n)        w on the simplex of S draws, members or models
    factored_weights   the same with w_s(p) made of a probability vector for each site at which a draw picks a component
    stack              either of them, for a model: finds the weights and sets them

The second is for implicit ensembles (Chang et al. 2019, whose future work it is): K components at each of L sites make
K^L networks, of which S draws see only some, so what can be learnt is how often to pick each component. Rows must be
held out: on training data the weights reward overfitting.

Sizes: S draws, N held-out rows, L sites, K_i components of site i.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.engine.noise import Seed
from slimbayes.engine.passes import posteriors_of
from slimbayes.posteriors.ensemble import EnsemblePosterior
from slimbayes.posteriors.mixture import MixturePosterior
from slimbayes.prediction.predict import predict
from slimbayes.prediction.sample import fixed_draws
from slimbayes.train.likelihoods import LikelihoodName


def stack(
    model: nn.Module,
    x: Any,
    target: Tensor,
    draws: int = 200,
    prior: float = 1.0,
    likelihood: LikelihoodName = "categorical",
    likelihood_std: float | Tensor = 0.0,
    class_dim: int | None = None,
    seed: Seed = None,
) -> dict[str, Tensor]:
    """Set the mixing weights of a trained model so that held-out rows become most probable, and return them by layer
    name.

    Of an `Ensemble`, these are weights of its members, which `predict` then uses. Of a model patched with one pick for
    each layer (EMP), they are the probabilities of every layer's components, estimated from `draws` draws under equal
    probabilities; later draws follow them, and `save` keeps them.

    Args:
        x, target: held-out inputs and what was observed, not the training data.
        draws: networks to draw, for EMP; every component of every layer must be among them.
        prior: pseudo-count that pulls each layer towards equal probabilities, for EMP.
        likelihood, likelihood_std, class_dim, seed: as in `predict`.

    Example:
        >>> import slimbayes as sb
        >>> nets = [nn.Linear(2, 2, bias=False) for _ in range(2)]
        >>> for net, sign in zip(nets, (1.0, -1.0)):
        ...     net.weight.data = sign * torch.eye(2)
        >>> stack(sb.ensemble(nets), torch.eye(2).repeat(20, 1), torch.tensor([0, 1] * 20))[""].round(decimals=2)
        tensor([1., 0.])
    """
    posteriors = posteriors_of(model)

    def scores() -> Tensor:
        found = predict(
            model,
            x,
            likelihood=likelihood,
            likelihood_std=likelihood_std,
            class_dim=class_dim,
        )
        return found.draw_log_prob(target).flatten(1)

    if posteriors and all(isinstance(p, EnsemblePosterior) for p in posteriors):
        return _stack_members(posteriors, scores)
    picks = [
        isinstance(p, MixturePosterior) and p.countable and p.members == 1
        for p in posteriors
    ]
    if not posteriors or not all(picks):
        kinds = sorted({type(p).__name__ for p in posteriors})
        raise ValueError(
            f"stack is for an Ensemble or for layers that pick one component each (ModelPatch without cross, "
            f"draws='forward'); got {', '.join(kinds) or 'no posterior'}."
        )
    found = [p.probs.clone() for p in posteriors]  # which stay where something fails
    try:
        for posterior in posteriors:
            posterior.set_probabilities(
                torch.full((posterior.components,), 1 / posterior.components)
            )
        with fixed_draws(model, draws, seed):
            held, choices = scores(), torch.stack([p.choices() for p in posteriors], 1)
        found = factored_weights(
            held, choices, [p.components for p in posteriors], prior
        )
    finally:
        for posterior, probs in zip(posteriors, found, strict=True):
            posterior.set_probabilities(probs)
    return {p.name: probs.float() for p, probs in zip(posteriors, found, strict=True)}


def _stack_members(
    posteriors: Sequence[Any], scores: Callable[[], Tensor]
) -> dict[str, Tensor]:
    counts = {p.name or "the model": p.members for p in posteriors}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(
            f"stack weighs the members of a model, but its layers have unequal numbers of them ({told}). "
            f"Give all layers the same, Ensemble(members={max(counts.values())})."
        )
    try:
        weights = stacking_weights(scores())
    except (RuntimeError, ValueError) as error:
        if "must match" not in str(error) and "different shapes" not in str(
            error
        ):  # tensors that do not join
            raise
        raise ValueError(
            f"stack needs members that predict in one shape, and these do not join: {error} "
            f"Look at each model's outputs for the same inputs; all need the same classes or targets."
        ) from error
    for posterior in posteriors:
        posterior.weights.copy_(weights)
    return {p.name: weights.float() for p in posteriors}


@torch.no_grad()
def stacking_weights(
    log_probs: Tensor, steps: int = 100, tolerance: float = 1e-9
) -> Tensor:
    """Weights of S predictive distributions that maximise the log score of their mixture on held-out rows.

    The problem is concave. The gradient g_s = mean_n p_s(y_n) / sum_t w_t p_t(y_n) has sum_s w_s g_s = 1 and its
    maximum bounds what is missing: the mean log score is within max_s g_s - 1 of the best there is. Equal distributions
    get equal weights.

    Args:
        log_probs: log p_s(y_n), -inf where a draw rules a row out; `Prediction.draw_log_prob` gives them.
        steps: Newton steps at most, each of order S^2 (N + S); some ten are usual.
        tolerance: stop when max_s g_s <= 1 + tolerance.

    Shape: log_probs (S, N); returns (S,) in float64.

    Example:
        >>> stacking_weights(torch.tensor([[0.9, 0.9, 0.1], [0.1, 0.1, 0.9], [0.1, 0.1, 0.1]]).log()).round(decimals=4)
        tensor([0.7083, 0.2917, 0.0000], dtype=torch.float64)
    """
    probs = _checked(log_probs)
    probs = (
        probs - probs.amax(0)
    ).exp()  # a row's scale drops out of its responsibilities
    weights = probs.new_full((len(probs),), 1 / len(probs))
    slack = torch.ones_like(weights)  # multipliers of w >= 0
    for _ in range(steps + 1):
        weights = weights / weights.sum()
        ratios = probs / (weights @ probs)
        gradient = ratios.mean(1)
        gap = float(gradient.max()) - 1
        if gap <= tolerance:
            return weights
        weights, slack = _newton(weights, slack, ratios, gradient)
    raise RuntimeError(
        f"Stacking stopped after {steps} steps, {gap:.1e} short of the best mean log score, with tolerance "
        f"{tolerance:.1e}; raise either."
    )


def _newton(
    weights: Tensor, slack: Tensor, ratios: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """One primal-dual interior-point step.

    It solves  1 - g(w) - slack = 0  and  w * slack = target  for a falling target: stacking without the constraint that
    w sums to one, but with sum_s w_s taken off the objective, whose solution sums to one by itself (Kim et al. 2020).
    """
    target = 0.1 * (weights @ slack) / len(weights)
    root = (
        weights.sqrt()
    )  # scaling by it keeps the system well-conditioned as weights vanish
    scaled = ratios * root[:, None]
    system = scaled @ scaled.T / ratios.shape[1] + slack.diag()
    move = root * torch.linalg.solve(system, root * (gradient - 1) + target / root)
    slack_move = target / weights - slack - slack / weights * move
    return _inside(weights, move), _inside(slack, slack_move)


def _inside(values: Tensor, move: Tensor) -> Tensor:
    """Go along `move`, at most 99% of the way to where the first positive value would reach zero."""
    return values + move * min(1.0, 0.99 / max(float((-move / values).max()), 0.99))


def factored_weights(
    log_probs: Tensor,
    choices: Tensor,
    components: Sequence[int],
    prior: float = 1.0,
    steps: int = 1000,
    tolerance: float = 1e-6,
) -> list[Tensor]:
    """Probabilities of each site's components that maximise the held-out log score of the implicit mixture.

        max over p of   sum_n log sum_s w_s(p) p_s(y_n)  +  prior * sum_i sum_k log p_i(k)
        with            w_s(p) ~ prod_i p_i(c_si) / f_i(c_si)

    f_i(k) is the share of draws that picked k at site i. The problem is not concave: this is the optimum reached from
    equal probabilities, never worse than those.

    Args:
        log_probs: log p_s(y_n), as for `stacking_weights`.
        choices: the component each draw picked at each site, independently of other sites.
        components: K_i of every site.
        prior: rows of evidence each component is given in advance. With few draws or rows, it keeps p from betting on
            the one combination that scored best by luck; 0 trusts the draws alone.
        steps: steps of L-BFGS at most.
        tolerance: stop when no gradient, per row and in log p, is larger.

    Shape: log_probs (S, N), choices (S, L); returns L tensors (K_i,) in float64.
    """
    scores = _checked(log_probs)
    shares = _drawn_shares(choices, components, len(scores))
    if not prior >= 0:
        raise ValueError(
            f"prior must be a number of rows, zero or more, got {prior!r}."
        )
    logits = [torch.zeros_like(share).requires_grad_() for share in shares]

    def loss() -> Tensor:
        logp = [logit.log_softmax(0) for logit in logits]
        # The unbiased importance weights of uniform draws, prod_i K_i p_i(c_si) / S, sum to one on average only. They
        # reward a p that sits on a single draw, which then counts prod_i K_i / S times. Normalised weights are a true
        # mixture of the draws. Dividing by the shares drawn, not by the 1 / K_i meant, takes the luck of unequal counts
        # out of p.
        tilt = torch.stack(
            [(a - b.log())[c] for a, b, c in zip(logp, shares, choices.T, strict=True)]
        ).sum(0)
        score = torch.logsumexp(tilt[:, None] + scores, 0).mean() - torch.logsumexp(
            tilt, 0
        )
        return -score - prior / scores.shape[1] * torch.cat(logp).sum()

    optimizer = torch.optim.LBFGS(
        logits,
        max_iter=steps,
        tolerance_grad=tolerance,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )  # its line search never goes up

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    with torch.enable_grad():
        optimizer.step(closure)
        closure()
    largest = float(
        torch.cat([p.grad for p in logits if p.grad is not None]).abs().max()
    )
    if not largest <= tolerance:
        raise RuntimeError(
            f"L-BFGS stopped after {steps} steps with a gradient of {largest:.1e}, tolerance {tolerance:.1e}; raise "
            "either."
        )
    return [logit.detach().softmax(0) for logit in logits]


def _checked(log_probs: Tensor) -> Tensor:
    """Log probabilities (S, N) in float64, of which every row has some that is finite."""
    if (
        not isinstance(log_probs, Tensor)
        or log_probs.dim() != 2
        or log_probs.numel() == 0
    ):
        got = (
            tuple(log_probs.shape)
            if isinstance(log_probs, Tensor)
            else f"a {type(log_probs).__name__}"
        )
        raise ValueError(
            f"log_probs of shape (S, N) are needed, S draws of N held-out rows, at least one each, got {got}: "
            f"`Prediction.draw_log_prob(target)` gives them."
        )
    wide = log_probs.detach().double()
    if bool((wide.isnan() | wide.isposinf()).any()):
        raise ValueError("log_probs must be finite or -inf, got nan or +inf.")
    dead = wide.isneginf().all(0)
    if bool(dead.any()):
        first = int(dead.nonzero()[0])
        raise ValueError(
            f"{int(dead.sum())} of {len(dead)} rows, the first is {first}, have log_probs -inf under every draw: no "
            "weights can help."
        )
    return wide


def _drawn_shares(
    choices: Tensor, components: Sequence[int], draws: int
) -> list[Tensor]:
    """Share of the draws that picked each component, site by site."""
    if (
        choices.shape != (draws, len(components))
        or choices.is_floating_point()
        or not components
    ):
        needed = f"indices of shape (S, L) = ({draws}, {len(components)}) are needed as choices"
        raise ValueError(
            f"{needed}, with L >= 1 sites in components, got {choices.dtype} of shape {tuple(choices.shape)}."
        )
    shares = []
    for site, (picked, size) in enumerate(zip(choices.T, components, strict=True)):
        low, high = int(picked.min()), int(picked.max())
        if low < 0 or high >= size:
            raise ValueError(
                f"Site {site} has {size} components, got choices from {low} to {high}."
            )
        count = torch.bincount(picked, minlength=size)
        if bool((count == 0).any()):
            raise ValueError(
                f"Site {site}: no draw picked component {int((count == 0).nonzero()[0])} of {size}; more draws are "
                "needed."
            )
        shares.append(count.double() / draws)
    return shares
