"""Judging predictions: their accuracy, calibration, diversity, and how they fare on corrupted and unfamiliar inputs.

Everything here takes tensors, a `Prediction` or plain numbers; nothing in the core depends on it. The metrics that take
batches are torchmetrics classes, imported when first asked for, so `import slimbayes` does not need torchmetrics:

    from slimbayes.metrics import ECE, NLL

    nll = NLL()
    nll.update(prediction, target)         # a batch
    nll.compute()                          # over all batches, and under DDP over all processes
"""

import importlib
from typing import TYPE_CHECKING, Any

from slimbayes.metrics.corruption import ALEXNET as ALEXNET
from slimbayes.metrics.corruption import ALEXNET_CLEAN as ALEXNET_CLEAN
from slimbayes.metrics.corruption import CorruptionErrors as CorruptionErrors
from slimbayes.metrics.corruption import corruption_errors as corruption_errors
from slimbayes.metrics.functional import Calibration as Calibration
from slimbayes.metrics.functional import calibration as calibration
from slimbayes.metrics.functional import crps_mixture as crps_mixture
from slimbayes.metrics.functional import crps_samples as crps_samples

if TYPE_CHECKING:
    from slimbayes.metrics.classification import *  # noqa: F403
    from slimbayes.metrics.confidence import *  # noqa: F403
    from slimbayes.metrics.regression import *  # noqa: F403
    from slimbayes.metrics.robustness import *  # noqa: F403

_STREAMING = {
    "classification": (
        "Accuracy", "TopK", "NLL", "Brier", "SoftLabelNLL",
        "Disagreement", "NormalisedDisagreement", "PairwiseKL", "CosineSimilarity",
    ),
    "confidence": ("ECE", "MCE", "AdaptiveECE", "ClasswiseECE", "AURC"),
    "regression": ("RMSE", "LPD", "CRPS", "IntervalCoverage"),
    "robustness": ("AUROC", "AUCPR", "FPR95", "ood_score"),
}  # fmt: skip
_HOME = {name: module for module, names in _STREAMING.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in (
            "torchmetrics",
            "lightning_utilities",
        ):
            raise
        raise ImportError(
            f'slimbayes.metrics.{name} needs torchmetrics: pip install "slimbayes[metrics]"'
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
