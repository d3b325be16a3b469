"""Step times of the k-tied paper's Table 4: two dense layers under point, mean-field and 2-tied posteriors.

    python benchmarks/k_tied.py [--device cuda] [--cases paper,wide] [--modes eager,compile] [--rounds 20] [--out FILE]

A step is draw, forward, KL, backward and Adam, one draw per batch; timing.py says how it is timed. The paper measured
2.00 ms for the point estimate, 7.17 for mean-field and 6.14 for 2-tied (TensorFlow, reparameterization): ratios of 3.6
and 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timing import Rows, prepare, race, run_cases
from torch import Tensor, nn

import slimbayes as sb

PRIOR = sb.Normal(0.0, 0.2)
METHODS: dict[str, sb.Config] = {
    "point": sb.Deterministic(),
    "mean-field reparam": sb.MeanField(prior=PRIOR),
    "mean-field flipout": sb.MeanField(prior=PRIOR, estimator="flipout"),
    "mean-field local": sb.MeanField(prior=PRIOR, estimator="local"),
    "2-tied reparam": sb.KTied(rank=2, prior=PRIOR),
    "2-tied flipout": sb.KTied(rank=2, prior=PRIOR, estimator="flipout"),
    "2-tied local": sb.KTied(rank=2, prior=PRIOR, estimator="local"),
}
COLUMNS = {
    "parameters": ("parameters", ","),
    "ms": ("step ms", ".3f"),
    "ratio": ("x point", ".2f"),
    "peak_mib": ("peak MiB", ".0f"),
}


@dataclass(frozen=True)
class DenseCase:
    """A network inputs-hidden-outputs and the rows of its batch."""

    inputs: int
    hidden: int
    outputs: int
    rows: int

    @property
    def sizes(self) -> str:
        return f"{self.inputs}-{self.hidden}-{self.outputs}, {self.rows} rows"


# "paper" is the Keras tutorial network of Table 4 with its batch of 32; in "wide" arithmetic outweighs overhead.
CASES = {
    "cpu": {"paper": DenseCase(784, 128, 10, 32), "wide": DenseCase(1024, 1024, 10, 256)},
    "cuda": {"paper": DenseCase(784, 128, 10, 32), "wide": DenseCase(4096, 4096, 4096, 4096)},
}


class DenseTrial:
    """One network under one method; `step` is what is timed. bfloat16 autocast on a GPU."""

    def __init__(self, case: DenseCase, config: sb.Config, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(case.inputs, case.hidden), nn.ReLU(), nn.Linear(case.hidden, case.outputs))
        self.model = sb.bayesianize(plain, config).to(device)
        self.x = torch.randn(case.rows, case.inputs, device=device)
        self.y = torch.randint(case.outputs, (case.rows,), device=device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self.objective = torch.compile(self._objective) if compiled else self._objective

    def _objective(self) -> Tensor:
        return sb.elbo(sb.categorical(sb.sample(self.model, self.x), self.y), self.model, num_data=60_000).loss

    def step(self) -> None:
        with self.autocast:
            loss = self.objective()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(case: DenseCase, device: torch.device, compiled: bool, rounds: int, methods: Sequence[str]) -> Rows:
    """{method: {parameters, ms, ratio, peak_mib}}, or {method: {error}} where a method could not be run."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64  # all methods share the code that is compiled
    builds = {name: partial(DenseTrial, case, METHODS[name], device, compiled) for name in methods}
    trials, rows = prepare(builds, DenseTrial.step, device)
    times = race({name: trial.step for name, trial in trials.items()}, "point", device, rounds)
    for name, trial in trials.items():
        rows[name] |= times[name] | {"parameters": sum(p.numel() for p in trial.model.parameters())}
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    return run_cases(CASES, list(METHODS), measure, COLUMNS, argv)


if __name__ == "__main__":
    main()
