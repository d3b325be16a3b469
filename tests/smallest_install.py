"""Every method converts, trains, predicts, saves and loads with torch, numpy and safetensors alone.

test_package.py runs this with an installed wheel, in an environment that holds nothing else.
"""

import tempfile
from copy import deepcopy
from pathlib import Path

import torch

import slimbayes as sb
from slimbayes.posteriors import METHODS

ARGUMENTS = {
    "Ensemble": {"init": "copies", "jitter": 0.1},
    "ModelPatch": {"components": 2},
}


def check(method: sb.Config, folder: Path) -> None:
    """The way of a model from conversion to a checkpoint that predicts."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(4, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(8, 3),
    ]
    net = torch.nn.Sequential(*layers)
    sb.bayesianize(net, method)
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    optimizer = torch.optim.SGD(sb.param_groups(net), lr=0.1)
    before = deepcopy(net.state_dict())
    sb.elbo(sb.categorical(sb.sample(net, x), y), net, num_data=12).loss.backward()
    optimizer.step()
    assert any(
        not torch.equal(before[name], value) for name, value in net.state_dict().items()
    )
    sb.save(net, folder)
    again = torch.nn.Sequential(
        *(deepcopy(layer) for layer in sb.debayesianize(deepcopy(net)))
    )
    sb.load(again, folder)
    assert all(
        torch.equal(value, net.state_dict()[name])
        for name, value in again.state_dict().items()
    )
    assert sb.predict(again.eval(), x, draws=4).probs.isfinite().all()


if __name__ == "__main__":
    for name, kind in METHODS.items():
        with tempfile.TemporaryDirectory() as folder:
            check(kind(**ARGUMENTS.get(name, {})), Path(folder) / "posterior")
        print(name)
