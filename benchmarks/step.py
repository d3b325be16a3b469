"""What a Bayesian step costs: its time over a plain network's on the same number of rows.

    python benchmarks/step.py [--device cuda] [--cases mlp,conv,lstm] [--modes eager,compile]
                              [--methods plain,batchensemble] [--rounds 20] [--out FILE]

A training step is draw, forward, KL, backward and optimizer; a prediction is draw and forward, in eval mode without
gradients. The plain network gets K * B different rows; K members get B rows each, all of them. timing.py says how it is
timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from timing import Rows, prepare, race, run_cases
from torch import Tensor, nn

import slimbayes as sb
from slimbayes import models

K = 4  # members; the plain network's rows are K times the batch
METHODS: dict[str, sb.Config] = {
    "plain": sb.Deterministic(),
    "rank1 draws=example": sb.Rank1(members=K),
    "rank1 draws=member": sb.Rank1(members=K, draws="member"),
    "batchensemble": sb.BatchEnsemble(members=K),
}
COLUMNS = {
    "train_ms": ("step ms", ".2f"),
    "train_ratio": ("x plain", ".2f"),
    "predict_ms": ("predict ms", ".2f"),
    "predict_ratio": ("x plain", ".2f"),
    "peak_mib": ("peak MiB", ".0f"),
}


def mlp(width: int, layers: int = 4) -> nn.Module:
    hidden = [m for _ in range(layers - 1) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, width))


class LSTMClassifier(nn.Module):
    def __init__(self, inputs: int, units: int, classes: int = 10) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, units, batch_first=True), nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@dataclass(frozen=True)
class StepCase:
    """A network and the rows it is timed on."""

    sizes: str
    build: Callable[[], nn.Module]
    row: tuple[int, ...]  # shape of one row of the input
    rows: int  # K * B


# CPU sizes keep the run near two minutes, most of it compiling; on CUDA arithmetic outweighs kernel launches.
CASES = {
    "cpu": {
        "mlp": StepCase("4 x 512, 256 rows", partial(mlp, 512), (512,), 256),
        "conv": StepCase("WRN-10-1, 32 rows of 16x16", partial(models.wrn, 10, 1), (3, 16, 16), 32),
        "lstm": StepCase("128 units, T=16, 128 rows", partial(LSTMClassifier, 32, 128), (16, 32), 128),
    },
    "cuda": {
        "mlp": StepCase("4 x 4096, 4096 rows, bf16", partial(mlp, 4096), (4096,), 4096),
        "conv": StepCase(
            "WRN-28-10, 512 rows of 32x32, bf16, channels-last", partial(models.wrn, 28, 10), (3, 32, 32), 512
        ),
        "lstm": StepCase("512 units, T=64, 512 rows, bf16", partial(LSTMClassifier, 128, 512), (64, 128), 512),
    },
}


class StepTrial:
    """One network under one method: `train` and `predict` are what is timed."""

    def __init__(self, case: StepCase, config: sb.Config, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(0)
        layout = torch.channels_last if device.type == "cuda" and len(case.row) == 3 else torch.preserve_format
        self.model = sb.bayesianize(case.build(), config).to(device=device, memory_format=layout)
        batch = case.rows // sb.members(self.model)
        self.x = torch.randn(batch, *case.row, device=device).to(memory_format=layout)
        self.y = torch.randint(10, (batch,), device=device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        self.optimizer = torch.optim.Adam(sb.param_groups(self.model), lr=1e-4, fused=True)
        # The model alone is compiled: factors are drawn before it runs, so that noise is not inlined into kernels over
        # activations. Sizes change between methods only: dynamic=False keeps later methods' sizes from being symbolic.
        self.call = torch.compile(self.model, dynamic=False) if compiled else self.model

    def train(self) -> None:
        self.model.train()
        with self.autocast:
            nll = sb.categorical(sb.sample(self.call, self.x), self.y)
        loss = sb.elbo(nll, self.model, num_data=50_000).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def predict(self) -> Tensor:
        self.model.eval()
        with self.autocast:
            return sb.sample(self.call, self.x)


def measure(
    case: StepCase, device: torch.device, compiled: bool, rounds: int, methods: Sequence[str] = tuple(METHODS)
) -> Rows:
    """{method: {train_ms, train_ratio, predict_ms, predict_ratio, peak_mib}}, or {method: {error}} where one fails."""
    if compiled:
        torch.compiler.reset()
        # All methods share the code that is compiled, and each adds two versions; past the default 8 they run eagerly.
        torch._dynamo.config.recompile_limit = 64
        # torch 2.11 fails an assertion of its own where this fuses batch norm's sums over rows with a factor's.
        if hasattr(torch._inductor.config.triton, "mix_order_reduction"):
            torch._inductor.config.triton.mix_order_reduction = False
    builds = {name: partial(StepTrial, case, METHODS[name], device, compiled) for name in methods}
    trials, rows = prepare(builds, StepTrial.train, device)
    for kind in ("train", "predict"):
        times = race({name: getattr(trial, kind) for name, trial in trials.items()}, "plain", device, rounds)
        for name, found in times.items():
            rows[name] |= {f"{kind}_{key}": value for key, value in found.items()}
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    return run_cases(CASES, list(METHODS), measure, COLUMNS, argv)


if __name__ == "__main__":
    main()
