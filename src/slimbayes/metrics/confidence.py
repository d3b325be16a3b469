"""Is confidence earned? Calibration errors, and the risk that remains when unsure predictions are withheld.

Bins are those of functional.py. ECE, MCE and ClasswiseECE need constant memory; AdaptiveECE and AURC sort, so they
keep 16 bytes per row. There rows of equal confidence share the mean of their errors, whatever order they arrive in.

Sizes: N rows, M rows of all batches, C classes, R bins.
"""

import torch
from torch import Tensor

from slimbayes.metrics.functional import (
    Classes,
    bin_errors,
    bin_index,
    bin_sums,
    confidence_and_hits,
    labelled,
    need_bins,
    surest_first,
)
from slimbayes.metrics.streaming import Streaming


# More right than torchmetrics' CalibrationError, which counts p = 1 as a bin of its own and has no drop rule.
class ECE(Streaming):
    """Expected calibration error, a fraction; nan if no bin is kept.

    Args:
        bins: R. The rank-1 paper takes 15 and drop=0, ensemble model patching 20 and drop=5.
        drop: leave out bins with at most so many rows of all batches together; they still count in n.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    Example:
        >>> metric = ECE()
        >>> for target in (torch.tensor([0, 0, 1]), torch.tensor([0, 1])):
        ...     metric.update(torch.tensor([[0.75, 0.25]]).expand(len(target), 2), target)
        >>> round(float(metric.compute()), 4)  # 75% sure, 60% right
        0.15
    """

    higher_is_better = False
    bin_sums: Tensor

    def __init__(self, bins: int = 15, drop: int = 0) -> None:
        need_bins(bins, drop)
        super().__init__()
        self.bins, self.drop = bins, drop
        self.add_sum("bin_sums", 3, bins)

    def update(self, probs: Classes, target: Tensor) -> None:
        self.add_to(
            "bin_sums", bin_sums(*confidence_and_hits(probs, target), self.bins)
        )

    def errors(self) -> tuple[Tensor, Tensor]:
        """ECE and MCE."""
        self.need_rows(self.bin_sums[0].sum())
        return bin_errors(self.bin_sums, self.drop)

    def compute(self) -> Tensor:
        return self.errors()[0]


class MCE(ECE):
    """Maximum calibration error: the largest gap of any kept bin, a fraction; nan if no bin is kept.

    Small bins make it noisy: ensemble model patching drops those of at most 5 rows.

    Args:
        bins, drop: as in `ECE`.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    Example:
        >>> metric = MCE(bins=20, drop=1)  # the single row of the other bin is dropped
        >>> round(float(metric(torch.tensor([0.9, 0.9, 0.7]), torch.tensor([1, 0, 0]))), 4)
        0.4
    """

    def compute(self) -> Tensor:
        return self.errors()[1]


class ClasswiseECE(Streaming):
    """Mean over classes c of the ECE of p_c as the probability of y = c (Kull et al. 2019).

    Args:
        classes: C; 2 for binary predictions.
        bins: R bins of equal width for each class.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    >>> float(ClasswiseECE(classes=2, bins=10)(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 1, 1])))
    0.25
    """

    higher_is_better = False
    class_bin_gaps: Tensor
    class_bin_rows: Tensor

    def __init__(self, classes: int, bins: int = 15) -> None:
        need_bins(bins)
        if classes < 2:
            raise ValueError(f"ClasswiseECE needs classes >= 2, got {classes!r}.")
        super().__init__()
        self.classes, self.bins = classes, bins
        self.add_sum("class_bin_gaps", classes * bins)
        self.add_sum("class_bin_rows")

    def update(self, probs: Classes, target: Tensor) -> None:
        rows, label = labelled(probs, target)
        if rows.shape[-1] != self.classes:
            raise ValueError(
                f"This ClasswiseECE is for {self.classes} classes, got probabilities of {rows.shape[-1]}."
            )
        index = bin_index(rows, self.bins) + self.bins * torch.arange(
            self.classes, device=rows.device
        )
        gap = torch.nn.functional.one_hot(label, self.classes) - rows.double()
        self.add_to(
            "class_bin_gaps",
            torch.bincount(index.flatten(), gap.flatten(), self.classes * self.bins),
        )
        self.add_to("class_bin_rows", len(rows))

    def compute(self) -> Tensor:
        self.need_rows(self.class_bin_rows)
        return self.class_bin_gaps.abs().sum() / (self.classes * self.class_bin_rows)


class ByConfidence(Streaming):
    """Keeps the confidence of each row and whether it was right."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_list("confidence")
        self.add_list("right")

    def update(self, probs: Classes, target: Tensor) -> None:
        confidence, right = confidence_and_hits(probs, target)
        self.add_to("confidence", confidence)
        self.add_to("right", right)

    def ordered(self) -> tuple[Tensor, Tensor]:
        """Confidences, most confident first, and for each the share of right rows among those of equal confidence."""
        return surest_first(self.all_of("confidence"), self.all_of("right"))


class AdaptiveECE(ByConfidence):
    """ECE with R bins of equal numbers of rows, up to one (Nguyen & O'Connor 2015; Mukhoti et al. 2020).

    Args:
        bins: R; with fewer rows each one is a bin.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    Example:
        >>> metric = AdaptiveECE(bins=2)  # (|2 - 1.7| + |1 - 1.3|) / 4
        >>> round(float(metric(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 1, 1, 0]))), 4)
        0.15
    """

    def __init__(self, bins: int = 15) -> None:
        need_bins(bins)
        super().__init__()
        self.bins = bins

    def compute(self) -> Tensor:
        confidence, right = self.ordered()
        index = torch.arange(len(right), device=right.device) * self.bins // len(right)
        return torch.bincount(index, right - confidence, self.bins).abs().sum() / len(
            right
        )


class AURC(ByConfidence):
    """Area under the risk-coverage curve: mean over k of the error among the k surest rows (Geifman et al. 2019).

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    Example:
        >>> metric = AURC()
        >>> metric.update(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 1, 0, 1]))
        >>> round(float(metric.compute()), 4)  # (0 + 0 + 1/3 + 1/4) / 4
        0.1458
        >>> coverage, risk = metric.curve()
        >>> risk[coverage <= 0.5].tolist()
        [0.0, 0.0]
    """

    def risk(self) -> Tensor:
        """Error rate among the k most confident rows, (M,)."""
        wrong = (1 - self.ordered()[1]).cumsum(0)
        return wrong / torch.arange(1, len(wrong) + 1, device=wrong.device)

    def compute(self) -> Tensor:
        return self.risk().mean()

    def curve(self) -> tuple[Tensor, Tensor]:
        """Coverage k / M and the risk, (M,) each, over all processes, which must all call it."""
        with self.sync_context():
            risk = self.risk()
        return torch.arange(1, len(risk) + 1, device=risk.device) / len(risk), risk
