"""A posterior for a network you already have, in cells: fine-tuning with few labels, one pass, chains.

    python examples/fine_tuning.py

A network that reads dark digits on white is taken to white ones on dark with 100 labels. Needs scikit-learn (the `demo`
extra); takes ten to sixty seconds.
"""

# %% Data: what the network was trained on, 100 labels of what it is for, and test rows, clean and noisy.
import copy
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.metrics import calibration


def digits() -> dict[str, tuple[Tensor, Tensor]]:
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = (
        torch.tensor(images, dtype=torch.float32)[order] / 8 - 1,
        torch.tensor(classes)[order],
    )
    noise = torch.randn(len(x) - 1000, 64, generator=torch.Generator().manual_seed(1))
    return {
        "before": (x[:900], y[:900]),
        "few": (-x[900:1000], y[900:1000]),
        "clean": (-x[1000:], y[1000:]),
        "noisy": (-x[1000:] + noise, y[1000:]),
    }


# %% The network you already have.
def pretrained(x: Tensor, y: Tensor) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    fit(net, x, y, steps=200)
    return net


def fit(net: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float = 3e-3) -> None:
    """Train what trains; the KL of a plain model would be nothing to add."""
    converted = any(hasattr(module, "posterior") for module in net.modules())
    optimizer = torch.optim.AdamW(
        sb.param_groups(net, 1e-2) if converted else net.parameters(), lr
    )
    for step in range(steps):
        if converted:
            outputs = sb.sample(net, x, seed=step)
            loss = sb.elbo(
                sb.categorical(outputs, y), net, num_data=len(x), kl_weight=0.1
            ).loss
        else:
            loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()


# %% Scores: log-likelihood and calibration, from any prediction.
def score(prediction: sb.Prediction, y: Tensor) -> dict[str, float]:
    right = (prediction.label == y).float()
    return {
        "accuracy": float(right.mean()),
        "nll": -float(prediction.log_prob(y).mean()),
        "ece": calibration(prediction, y).ece,
    }


# %% All of it.
def main(
    steps: int = 150, draws: int = 50, chains: int = 4
) -> dict[str, dict[str, dict[str, float]]]:
    data = digits()
    x, y = data["few"]
    base = pretrained(*data["before"])
    results: dict[str, dict[str, dict[str, float]]] = {}

    def report(name: str, predict: Any) -> None:
        results[name] = {
            kind: score(predict(data[kind][0]), data[kind][1])
            for kind in ("clean", "noisy")
        }
        shown = "   ".join(
            f"{k}: " + " ".join(f"{m} {v:.3f}" for m, v in s.items())
            for k, s in results[name].items()
        )
        print(f"{name:28s} {shown}")

    # The usual way: all weights.
    plain = copy.deepcopy(base)
    fit(plain, x, y, steps)
    deterministic = sb.bayesianize(copy.deepcopy(plain), sb.Deterministic())
    report("plain", lambda inputs: sb.predict(deterministic, inputs))

    # A posterior over a frozen base, and a head: what is saved beside the base is small.
    tuned = sb.bayesianize(
        copy.deepcopy(base),
        sb.Rank1(members=4, prior=sb.Normal(1.0, 0.3), scale_init=0.1),
        train="posterior+head",
        head="4",
    )
    print(sb.trainable(tuned))
    fit(tuned, x, y, steps, lr=1e-2)
    report(
        "rank-1 posterior and head",
        lambda inputs: sb.predict(tuned, inputs, draws=draws, seed=0),
    )
    with tempfile.TemporaryDirectory() as folder:
        again = sb.load(copy.deepcopy(base), sb.save(tuned, f"{folder}/adapter"))
    assert torch.equal(
        sb.predict(again, x, seed=0).probs, sb.predict(tuned, x, seed=0).probs
    )
    report(
        "its mean, a plain net",
        lambda inputs: sb.predict(
            sb.bayesianize(sb.materialize(tuned, member="mean"), sb.Deterministic()),
            inputs,
        ),
    )

    # One pass over the data gives the plain network a posterior.
    laplace = copy.deepcopy(plain)
    found = sb.laplace(laplace, [(x, y)])
    print(f"log evidence {found.log_evidence:.1f} nats")
    report(
        "Laplace, linearised",
        lambda inputs: sb.predict_linearised(laplace, inputs, draws=draws, seed=0),
    )
    report(
        "Laplace, sampled",
        lambda inputs: sb.predict(laplace, inputs, draws=draws, seed=0),
    )
    last = copy.deepcopy(plain)
    sb.laplace(last, [(x, y)], over="weights", layers="last")
    report(
        "last-layer Laplace",
        lambda inputs: sb.predict_linearised(last, inputs, draws=draws, seed=0),
    )

    # Chains over the factors.
    walked = copy.deepcopy(plain)
    sb.sample_posterior(
        walked,
        [(x, y)],
        "sghmc",
        chains=chains,
        draws=10,
        burn_in=100,
        prior=sb.Normal(1.0, 0.3),
        seed=0,
    )
    report("SGHMC chains", lambda inputs: sb.predict(walked, inputs))
    return results


if __name__ == "__main__":
    main()
