"""sample_posterior: chains over the rank-1 factors of a network, whose states become members of the model.

It is what the rank-1 paper leaves for the future: Monte Carlo over r and s instead of a variational family, with
independent chains mixed. The weights W stay where they are.

Sizes: K chains, S states of each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slimbayes.convert.bayesianize import bayesianize, debayesianize, restate
from slimbayes.convert.plan import Selection
from slimbayes.distributions.families import Distribution, Normal, Point
from slimbayes.engine import passes
from slimbayes.engine.locate import unwrapped
from slimbayes.engine.noise import Seed, seed_of
from slimbayes.inference.density import HMC, Density, Loss, langevin, normals
from slimbayes.inference.means import Factors, plain_model, set_factors
from slimbayes.posteriors.configs.base import check_choice, check_count, check_whole
from slimbayes.posteriors.configs.rank1 import Rank1
from slimbayes.posteriors.factors import Drawn
from slimbayes.posteriors.rank1 import Rank1Posterior
from slimbayes.seeds import key
from slimbayes.train.elbo import check_finite
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named

Method = Literal["sghmc", "sgld", "cyclical", "hmc"]
Named = Mapping[str, float]
_METHODS = ("sghmc", "sgld", "cyclical", "hmc")
_MOST = 4096  # states that a model may hold as members


@dataclass(frozen=True)
class Chains:
    """What chains went through; the model itself holds their states as members, state by state, chain by chain.

    Attributes:
        model: the converted model, with S x K members; number s K + k is state s of chain k.
        states: (K, S, D), all factors of all layers side by side.
        log_density: (K, S), unnormalised; of one batch, scaled up, for stochastic gradients.
        acceptance: mean acceptance probability of "hmc"; 1 for others, which have no such step.
        step_size: with which states were drawn.
    """

    model: nn.Module = field(repr=False)
    states: Tensor = field(repr=False)
    log_density: Tensor = field(repr=False)
    acceptance: float
    step_size: float

    def to_arviz(self) -> Any:
        """The states and log densities as ArviZ's InferenceData: `az.summary`, `az.rhat`, `az.ess` take it.

        Factors have a symmetry: c r and s / c are one network. Judge chains by `log_density` and by predictions.
        """
        try:
            import arviz
        except ImportError as error:
            raise ImportError(
                "Diagnostics of chains need ArviZ: pip install arviz."
            ) from error
        found = {"log_density": self.log_density, "factors": self.states}
        return arviz.from_dict(
            posterior={name: t.cpu().numpy() for name, t in found.items()}
        )


def sample_posterior(
    model: nn.Module,
    data: Iterable[Any] | Loss,
    method: Method = "sghmc",
    likelihood: LikelihoodName = "categorical",
    chains: int = 4,
    draws: int = 20,
    burn_in: int = 200,
    thin: int = 10,
    step_size: float = 0.01,
    friction: float = 0.1,
    cycles: int = 4,
    leapfrog: int = 10,
    prior: Distribution | None = None,
    temperature: float = 1.0,
    likelihood_std: float = 1.0,
    base_lr: float = 0.0,
    include: Selection = None,
    exclude: Selection = None,
    output: str | int | None = None,
    seed: Seed = None,
) -> Chains:
    """Run Markov chains over the rank-1 factors of a network and keep their states as members of the model, in place.

    Args:
        model: in eval mode; plain, or converted by a rank-1 method whose members then start one chain each.
        data: batches (inputs, targets) that can be gone through again and again; or a function of the model that gives
            the negative log-likelihood of all data under each of its members, (K,).
        method: "sghmc", "sgld" and "cyclical" take gradients of batches, "hmc" of all data, with an acceptance step:
            the ground truth for small networks.
        likelihood, likelihood_std: what outputs mean, and the standard deviation of a "gaussian" target's noise.
        chains, draws: K, and S states of each; the model gets K x S members.
        burn_in: steps before the first state. "hmc" adapts its step meanwhile; "cyclical" has none.
        thin: steps from one state to the next.
        step_size: a learning rate for the mean loss; for "hmc" that of the first leapfrog step on the sum.
        friction: of "sghmc" and "cyclical".
        cycles: of "cyclical"; states are shared out among them.
        leapfrog: most steps of one path of "hmc"; a third of it at least.
        prior: of every factor; by default that of the converted model, or Normal(1, 0.1).
        temperature: below 1 the posterior is sharpened; near 0 chains end at its mode.
        base_lr: learning rate of the network's own weights while "sghmc" or "sgld" burns in; they stay afterwards,
            since all states share them.
        include, exclude: which layers of a plain model, as in `bayesianize`.
        output: which output, as in `predict`.
        seed: of the chains.

    Raises:
        FloatingPointError: a chain diverged. The model is then as it was.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
        >>> data = [(torch.randn(20, 4), torch.randint(3, (20,)))]
        >>> chains = sb.sample_posterior(net, data, chains=2, draws=3, burn_in=5, thin=1, seed=0)
        >>> chains.states.shape, sb.predict(net, torch.randn(5, 4)).member_probs.shape
        (torch.Size([2, 3, 23]), torch.Size([6, 5, 3]))
    """
    likelihood_named(likelihood)
    counts = {
        "chains": chains,
        "draws": draws,
        "thin": thin,
        "cycles": cycles,
        "leapfrog": leapfrog,
    }
    positive = {
        "step_size": step_size,
        "temperature": temperature,
        "likelihood_std": likelihood_std,
    }
    _check(model, method, counts, positive, burn_in, base_lr, friction)
    if chains * draws > _MOST:
        raise ValueError(
            f"sample_posterior: {chains} chains of {draws} draws are more members than a model holds ({_MOST:,}). Keep "
            f"fewer states with a larger thin=."
        )
    given, model = model, unwrapped(model)
    check_finite(model)
    work, means, said = plain_model(model, copy=bool(base_lr))
    if means and (include is not None or exclude is not None):
        raise ValueError(
            "sample_posterior: include and exclude choose layers of a plain model; this one's are set."
        )
    first = next(iter(passes.posteriors_of(model)), None)
    known = first.prior_of_factors if isinstance(first, Rank1Posterior) else None
    prior = prior or known or Normal(1.0, 0.1)
    generator = torch.Generator().manual_seed(key(seed_of(seed), "chains"))
    try:
        _begin(work, means, chains, include, exclude, generator)
        restate(
            said, work, freezing=not base_lr
        )  # which moves the network's own weights
        density = Density(
            work, data, likelihood, likelihood_std, prior, temperature, output
        )
        if method == "hmc":
            sampler = HMC(density, step_size, leapfrog, generator)
            kept = list(sampler.run(burn_in, draws, thin))
            _judge(sampler, chains)
            step_size, acceptance = sampler.step_size, sampler.accepted / sampler.paths
        else:
            steps, acceptance = (burn_in, draws, thin, cycles), 1.0
            kept = list(
                langevin(
                    density, method, step_size, friction, *steps, base_lr, generator
                )
            )
        found = _states(work, kept)
    except BaseException:
        debayesianize(work)
        raise
    debayesianize(model)
    if work is not model:
        model.load_state_dict(debayesianize(work).state_dict())
    config = Rank1(members=chains * draws, posterior="point", clip=None, draws="member")
    bayesianize(
        model, config, include=lambda name, _: name in found
    )  # so that its members are these states
    set_factors(model, found)
    restate(said, model)
    states = torch.stack([torch.cat(factors, 1) for factors, _ in kept], 1)
    return Chains(
        given,
        states,
        torch.stack([value for _, value in kept], 1),
        acceptance,
        step_size,
    )


def _check(
    model: nn.Module,
    method: str,
    counts: Named,
    positive: Named,
    burn_in: int,
    base_lr: float,
    friction: float,
) -> None:
    """Refuse what chains cannot run with."""
    check_choice("sample_posterior", "method", method, _METHODS)
    if any(m.training for m in model.modules()):
        raise ValueError(
            "sample_posterior needs the network as it predicts: call model.eval() first."
        )
    for name, count in counts.items():
        check_count("sample_posterior", name, count, most=None)
    check_whole("sample_posterior", "burn_in", burn_in)
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise ValueError(
                f"sample_posterior: {name} must be positive and finite, got {value!r}."
            )
    if not 0 < friction <= 1:
        raise ValueError(
            f"sample_posterior: friction must be above 0 and at most 1, got {friction!r}."
        )
    if not 0 <= base_lr < math.inf or (base_lr and method in ("hmc", "cyclical")):
        raise ValueError(
            f"sample_posterior: base_lr must not be negative, and weights move while 'sghmc' or 'sgld' burns in, with "
            f"no other method: got base_lr={base_lr!r} for {method!r}."
        )


@torch.no_grad()
def _begin(
    model: nn.Module,
    means: Factors,
    chains: int,
    include: Selection,
    exclude: Selection,
    generator: torch.Generator,
) -> None:
    """One member for each chain: at the means of a converted model's members by turns, else near one."""
    config = Rank1(
        members=chains,
        posterior="point",
        mean_init=Point(1.0),
        clip=None,
        draws="member",
    )
    if not means:
        bayesianize(model, config, include=include, exclude=exclude)
        for loc in (f.loc for p in passes.posteriors_of(model) for f in (p.r, p.s)):
            loc.add_(0.02 * normals(loc, generator))
        return
    bayesianize(model, config, include=lambda name, _: name in means)

    def of_chains(d: Drawn) -> Drawn:
        turn = torch.arange(chains, device=d.r.device) % len(d.r)
        return Drawn(d.r[turn], d.s[turn], None if d.bias is None else d.bias[turn])

    set_factors(
        model,
        {
            n: {site: of_chains(d) for site, d in sites.items()}
            for n, sites in means.items()
        },
    )


def _judge(sampler: HMC, chains: int) -> None:
    rate, lost = (
        sampler.accepted / sampler.paths,
        sampler.divergent / (sampler.paths * chains),
    )
    if rate < 0.01:
        raise FloatingPointError(
            f"sample_posterior: chains stand still: {rate:.1%} of their paths are accepted. Lower "
            f"step_size={sampler.step_size:.2g}, or give more burn_in, which adapts it."
        )
    if lost > 0.01:
        warnings.warn(
            f"{lost:.0%} of the paths diverged: the chains do not reach parts of the posterior. Lower step_size= or "
            f"give more burn_in.",
            stacklevel=3,
        )


def _states(model: nn.Module, kept: list[tuple[list[Tensor], Tensor]]) -> Factors:
    """Factors (S K, ...) of every site, by layer, with the biases that its chains had."""
    posteriors: list[Any] = passes.posteriors_of(model)
    names = {id(layer): name for name, layer in model.named_modules()}
    out: Factors = {}
    for i, p in enumerate(posteriors):
        r, s = (torch.cat([factors[2 * i + j] for factors, _ in kept]) for j in (0, 1))
        bias = (
            None
            if p.bias is None
            else nn.functional.pad(p.bias.detach(), (0, 0, 1, 0)).repeat(len(kept), 1)
        )
        out.setdefault(names[id(p.layer)], {})[p.site.name] = Drawn(r, s, bias)
    return out
