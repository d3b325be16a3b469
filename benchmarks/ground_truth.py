"""How far methods are from Hamiltonian Monte Carlo on a small network: a table in Markdown.

    python benchmarks/ground_truth.py

A network of one hidden layer is trained on some of scikit-learn's digits. Long HMC chains over its rank-1 factors are
the truth: the posterior of factors under the prior Normal(1, 0.2), given the trained weights. Each method then
predicts other digits, plain and noisy ones. As in Izmailov et al. (2021), agreement is the share of rows with the
same most probable class, total variation half the mean absolute difference of probabilities, both against the mean of
all chains. Two halves of the chains, one against the other, say how much of that is noise of the truth itself. The
network was trained without this prior, so that factors of one are not its mode; "at the mode" first finds it by
gradient descent.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import slimbayes as sb

PRIOR = sb.Normal(1.0, 0.2)
TRAIN, TEST = 250, 400


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Training rows, their labels, and test rows of which half are noisy."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    rows = torch.tensor(x, dtype=torch.float32)[order] / 8 - 1
    test = rows[TRAIN : TRAIN + TEST].clone()
    test[TEST // 2 :] += torch.randn(
        TEST - TEST // 2, 64, generator=torch.Generator().manual_seed(1)
    )
    return rows[:TRAIN], torch.tensor(y)[order][:TRAIN], test


def trained(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


def variational(
    net: nn.Module, config: sb.Config, x: Tensor, y: Tensor, steps: int = 1500
) -> None:
    sb.bayesianize(net, config, train="posterior")
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        sb.elbo(
            sb.categorical(sb.sample(net, x, draws=2), y), net, num_data=len(x)
        ).loss.backward()
        optimizer.step()


def to_mode(net: nn.Module, x: Tensor, y: Tensor, steps: int = 500) -> None:
    """Point factors of most posterior density."""
    sb.bayesianize(
        net,
        sb.Rank1(members=1, posterior="point", mean_init=sb.Point(1.0)),
        train="posterior",
    )
    factors = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(factors, 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        log_prior = sum(PRIOR.log_prob(f).sum() for f in factors)
        (len(x) * sb.categorical(sb.sample(net, x), y) - log_prior).backward()
        optimizer.step()


def main() -> None:
    x, y, test = digits()
    net = trained(x, y)
    data = [(x, y)]
    batches = list(zip(x.split(50), y.split(50), strict=True))

    def predicted(fit: Callable[[nn.Module], object], draws: int = 200) -> Tensor:
        own = copy.deepcopy(net)
        fit(own)
        return sb.predict(
            own, test, draws=draws if sb.members(own) == 1 else None, seed=0
        ).probs

    chains = copy.deepcopy(net)
    began = time.perf_counter()
    found = sb.sample_posterior(
        chains,
        data,
        "hmc",
        chains=16,
        draws=80,
        burn_in=120,
        thin=2,
        leapfrog=16,
        step_size=0.02,
        prior=PRIOR,
        seed=0,
    )
    truth = sb.predict(chains, test, keep_samples=True)
    halves = [truth.samples[k::2].mean(0) for k in (0, 1)]  # odd and even chains
    print(
        f"HMC: {found.acceptance:.0%} accepted, {time.perf_counter() - began:.0f} s\n"
    )

    def linearised(mode: bool) -> Tensor:
        own = copy.deepcopy(net)
        at_mode(own) if mode else sb.laplace(own, data, prior=PRIOR)
        return sb.predict_linearised(own, test, draws=400, seed=0).probs

    def at_mode(own: nn.Module, structure: Any = "full") -> None:
        to_mode(own, x, y)
        sb.laplace(own, data, prior=PRIOR, structure=structure)

    sg = {"chains": 8, "draws": 25, "prior": PRIOR, "seed": 0}
    rank1 = sb.Rank1(members=1, prior=PRIOR, mean_init=sb.Point(1.0), scale_init=0.1)
    rows: dict[str, Callable[[], Tensor]] = {
        "HMC, one half against the other": lambda: halves[1],
        "plain network": lambda: net(test).softmax(1).detach(),
        "rank-1 VI": lambda: predicted(lambda m: variational(m, rank1, x, y)),
        "2-tied VI over weights": lambda: predicted(
            lambda m: variational(
                m, sb.KTied(prior=sb.TiedMean(0.05), scale_init=0.02), x, y
            )
        ),
        "Laplace, sampled": lambda: predicted(
            lambda m: sb.laplace(m, data, prior=PRIOR)
        ),
        "Laplace, linearised": lambda: linearised(False),
        "mode of the factors": lambda: predicted(lambda m: to_mode(m, x, y)),
        "Laplace at the mode, sampled": lambda: predicted(at_mode),
        "Laplace at the mode, diagonal, sampled": lambda: predicted(
            lambda m: at_mode(m, "diagonal")
        ),
        "Laplace at the mode, linearised": lambda: linearised(True),
        "SGLD": lambda: predicted(
            lambda m: sb.sample_posterior(
                m, batches, "sgld", burn_in=1000, thin=50, step_size=0.1, **sg
            )
        ),
        "SGHMC": lambda: predicted(
            lambda m: sb.sample_posterior(
                m, batches, "sghmc", burn_in=500, thin=30, step_size=0.01, **sg
            )
        ),
        "cyclical SGHMC": lambda: predicted(
            lambda m: sb.sample_posterior(
                m, batches, "cyclical", thin=20, cycles=5, step_size=0.02, **sg
            )
        ),
    }
    print("| method | total variation | agreement | seconds |\n|---|---|---|---|")
    for name, run in rows.items():
        began = time.perf_counter()
        probs, against = run(), halves[0] if name.startswith("HMC") else truth.probs
        variation = 0.5 * (probs - against).abs().sum(1).mean()
        agreement = (probs.argmax(1) == against.argmax(1)).float().mean()
        print(
            f"| {name} | {variation:.4f} | {agreement:.1%} | {time.perf_counter() - began:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
