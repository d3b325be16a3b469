"""Corruption errors from batches: top-1 errors of every corruption and severity, summed as they come, against a reference.

The maths and the references are those of `corruption_errors` (corruption.py): mCE and, of what corruption adds, rmCE, in percent.

Sizes: N rows, C classes.
"""

import torch
from torch import Tensor

from slimbayes.errors import did_you_mean
from slimbayes.metrics.corruption import CorruptionErrors, Rates, corruption_errors
from slimbayes.metrics.inputs import labelled
from slimbayes.metrics.streaming import Streaming
from slimbayes.prediction.prediction import Prediction


class CorruptionError(Streaming):
    """Mean corruption error (mCE) in percent of a reference network's: 100 is as bad as the reference. Constant memory.

    Args:
        reference: error rates, as fractions, of each corruption at every severity, such as `ALEXNET`, and perhaps the "clean" one. All its
            corruptions and severities must be seen before compute; unseen clean rows only cost the relative error.

    Shape: update(probs (N, ..., C), target (N, ...), corruption, severity from 1); corruption "clean" has no severity.

    Example:
        >>> metric = CorruptionError({"fog": [0.5, 0.5]})
        >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1]])
        >>> metric.update(probs, torch.tensor([0, 0]), "fog", 1)
        >>> metric.update(probs, torch.tensor([0, 1]), "fog", 2)
        >>> float(metric.compute())  # 100 * (0 + 1/2) / (1/2 + 1/2)
        50.0
    """

    higher_is_better = False
    wrong_by_corruption: Tensor
    rows_by_corruption: Tensor

    def __init__(self, reference: Rates) -> None:
        corruption_errors(reference, reference)  # refuses rates that cannot serve
        super().__init__()
        self.reference = {name: rates if name == "clean" else list(rates) for name, rates in sorted(reference.items())}
        self.start, length = {"clean": 0}, 1  # where a corruption's severities begin in the sums
        for name, rates in self.reference.items():
            if name != "clean":
                self.start[name], length = length, length + len(rates)
        self.add_sum("wrong_by_corruption", length)
        self.add_sum("rows_by_corruption", length)

    def update(self, probs: Prediction | Tensor, target: Tensor, corruption: str, severity: int | None = None) -> None:
        """Take a batch of one corruption and severity."""
        place = self.place(corruption, severity)
        rows, label = labelled(probs, target)
        here = torch.zeros_like(self.rows_by_corruption)
        here[place] = 1
        self.add_to("wrong_by_corruption", here * float((rows.argmax(-1) != label).sum()))
        self.add_to("rows_by_corruption", here * len(rows))

    def place(self, corruption: str, severity: int | None) -> int:
        if corruption not in self.start:
            raise ValueError(f"The reference has no corruption {corruption!r}{did_you_mean(corruption, self.start)}")
        if corruption == "clean":
            if severity not in (None, 0):
                raise ValueError(f"Clean rows have no severity, got {severity!r}.")
            return 0
        severities = len(self.reference[corruption])
        if severity not in range(1, severities + 1):
            raise ValueError(f"{corruption}: the severity must be one of 1 to {severities}, got {severity!r}.")
        return self.start[corruption] + severity - 1

    def errors(self) -> CorruptionErrors:
        self.need_some(self.rows_by_corruption.sum())
        rates = (self.wrong_by_corruption / self.rows_by_corruption).tolist()
        unseen = self.rows_by_corruption == 0
        places = [(name, s) for name in self.start if name != "clean" for s in range(1, len(self.reference[name]) + 1)]
        missing = [f"{name} {s}" for name, s in places if unseen[self.place(name, s)]]
        if missing:
            raise ValueError(f"{type(self).__name__} has no rows yet of {', '.join(missing)}.")
        ours = {name: rates[at : at + len(self.reference[name])] for name, at in self.start.items() if name != "clean"}
        if unseen[0] or "clean" not in self.reference:
            return corruption_errors(ours, {name: rate for name, rate in self.reference.items() if name != "clean"})
        return corruption_errors({**ours, "clean": rates[0]}, self.reference)

    def compute(self) -> Tensor:
        """The error over all rows so far, of all processes."""
        return self.rows_by_corruption.new_tensor(self.errors().mce)

    def details(self) -> CorruptionErrors:
        """Both means and the errors of each corruption, over all processes, which must all call it."""
        with self.sync_context():
            return self.errors()


class RelativeCorruptionError(CorruptionError):
    """Mean relative corruption error (rmCE): what corruption adds to the clean error, in percent of what it adds to the reference's.

    Args:
        reference: as for `CorruptionError`, with the "clean" error rate.

    Shape: update(probs (N, ..., C), target (N, ...), corruption, severity from 1); corruption "clean" has no severity.

    Example:
        >>> metric = RelativeCorruptionError({"clean": 0.0, "fog": [0.5]})
        >>> probs = torch.tensor([[0.9, 0.1]] * 4)
        >>> metric.update(probs, torch.tensor([0, 0, 0, 1]), "clean")
        >>> metric.update(probs, torch.tensor([0, 0, 1, 1]), "fog", 1)
        >>> float(metric.compute())  # 100 * (2/4 - 1/4) / (1/2 - 0)
        50.0
    """

    def __init__(self, reference: Rates) -> None:
        if "clean" not in reference:
            raise ValueError('A relative error needs the reference\'s "clean" error rate.')
        super().__init__(reference)

    def compute(self) -> Tensor:
        """The error over all rows so far, of all processes."""
        if self.rows_by_corruption.sum() and not self.rows_by_corruption[0]:
            raise ValueError("RelativeCorruptionError has no clean rows yet.")
        return self.rows_by_corruption.new_tensor(self.errors().rmce)
