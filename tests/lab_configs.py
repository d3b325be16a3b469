"""Small experiments for tests of the lab."""

from pathlib import Path
from typing import Any

from slimbayes.lab.config import Experiment
from slimbayes.lab.config_files import merged, validate
from slimbayes.lab.execution import Execution

CPU = Execution(accelerator="cpu", workers=0)
BASE: dict[str, Any] = {
    "name": "try",
    "data": {"name": "digits", "train_limit": 200, "test_limit": 100},
    "model": {"kind": "small_cnn", "width": 4},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 2, "batch": 50, "optimizer": {"kind": "AdamW", "lr": 0.01}},
    "evaluate": {"examples": 2},
}
# One of each method, as the lab would run it on the small network.
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"kind": "Deterministic"},
    "rank1": {"kind": "Rank1", "members": 2},
    "rank1-cauchy": {"kind": "Rank1", "members": 2, "prior": {"kind": "Cauchy", "loc": 1.0, "scale": 0.1}},
    "batchensemble": {"kind": "BatchEnsemble", "members": 2},
    "mean-field": {"kind": "MeanField"},
    "2-tied": {"kind": "KTied", "rank": 2},
    "matrix-normal": {"kind": "MatrixNormal"},
    "emp": {"kind": "ModelPatch", "components": 3, "patch": "norm+output"},
    "ecmp": {"kind": "ModelPatch", "components": 3, "cross": True},
    "dropout": {"kind": "MCDropout", "before": "norm", "rate": 0.1},
    "drop-connect": {"kind": "DropConnect"},
    "ensemble": {"kind": "Ensemble", "members": 2},
    "mixture": {"kind": "Mixture", "components": 2},
    "member-norm": {
        "kind": "ByName",
        "layers": {
            "norm.*": {"kind": "MemberNorm", "members": 2},
            "conv.*|dense": {"kind": "BatchEnsemble", "members": 2},
        },
    },
    "by-name": {
        "kind": "ByName",
        "layers": {"norm.*": {"kind": "ModelPatch", "components": 2}, "conv.*|dense": {"kind": "Rank1", "members": 2}},
    },
}


def experiment(**changes: Any) -> Experiment:
    return validate(merged(BASE, changes))


def weights(run: Path) -> bytes:
    """What was learned, as stored: posterior and network."""
    return (run / "model" / "posterior.safetensors").read_bytes() + (run / "model" / "base.safetensors").read_bytes()
