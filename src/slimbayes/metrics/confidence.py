"""Is confidence earned? Calibration errors, and the risk that remains when unsure predictions are withheld.

    ECE            sum_r |B_r| / n * |accuracy(B_r) - confidence(B_r)|      R bins of equal width, as in `calibration`
    MCE            max_r             |accuracy(B_r) - confidence(B_r)|
    AdaptiveECE    the ECE with bins of equal numbers of rows (Nguyen & O'Connor 2015; Mukhoti et al. 2020)
    ClasswiseECE   mean over classes c of the ECE of p_c as the probability of y = c (Kull et al. 2019)
    AURC           mean over k of the error rate among the k most confident rows (Geifman et al. 2019)

ECE, MCE and ClasswiseECE need constant memory; AdaptiveECE and AURC sort, so they keep 16 bytes per row. Rows of equal
confidence share the mean of their errors, so that the order in which rows, or processes, arrive does not matter.

Sizes: M rows, C classes, R bins.
"""

import torch
from torch import Tensor

from slimbayes.metrics.calibration import bin_errors, bin_index, bin_sums, judged
from slimbayes.metrics.inputs import labelled
from slimbayes.metrics.streaming import Streaming
from slimbayes.prediction.prediction import Prediction


class ECE(Streaming):
    """Expected calibration error, a fraction; nan if no bin is kept.

    The rule for edges is that of `calibration`: bins ((r-1)/R, r/R], in the precision of the probabilities, certainty in the last.

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
        need_bins(bins)
        if drop < 0:
            raise ValueError(f"drop must be at least 0, got {drop!r}.")
        super().__init__()
        self.bins, self.drop = bins, drop
        self.add_sum("bin_sums", 3, bins)

    def update(self, probs: Prediction | Tensor, target: Tensor) -> None:
        """Take a batch."""
        self.add_to("bin_sums", bin_sums(*judged(probs, target), self.bins))

    def errors(self) -> tuple[Tensor, Tensor]:
        self.need_some(self.bin_sums[0].sum())
        return bin_errors(self.bin_sums, self.drop)

    def compute(self) -> Tensor:
        """The error over all rows so far, of all processes."""
        return self.errors()[0]


class MCE(ECE):
    """Maximum calibration error: the largest gap of any kept bin, a fraction; nan if no bin is kept.

    Small bins make it noisy: ensemble model patching drops those of at most 5 rows.

    Args:
        bins, drop: as in `ECE`.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    Example:
        >>> metric = MCE(bins=20, drop=1)
        >>> metric.update(torch.tensor([0.9, 0.9, 0.7]), torch.tensor([1, 0, 0]))
        >>> round(float(metric.compute()), 4)  # the single row of the other bin is dropped
        0.4
    """

    def compute(self) -> Tensor:
        """The error over all rows so far, of all processes."""
        return self.errors()[1]


class Ranked(Streaming):
    """Keeps the confidence of each row and whether it was right."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_list("confidence", "right")

    def update(self, probs: Prediction | Tensor, target: Tensor) -> None:
        """Take a batch."""
        confidence, right = judged(probs, target)
        self.add_to("confidence", confidence)
        self.add_to("right", right)

    def ordered(self) -> tuple[Tensor, Tensor]:
        """Confidences, most confident first, and for each the share of right rows among those of equal confidence."""
        confidence, order = self.all_of("confidence").sort(descending=True)
        _, group, size = confidence.unique_consecutive(return_inverse=True, return_counts=True)
        right = torch.bincount(group, self.all_of("right")[order]) / size
        return confidence, right[group]


class AdaptiveECE(Ranked):
    """Expected calibration error with R bins of equal numbers of rows, up to one. Keeps all confidences.

    Args:
        bins: R; with fewer rows each one is a bin.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    Example:
        >>> metric = AdaptiveECE(bins=2)
        >>> metric.update(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 1, 1, 0]))
        >>> round(float(metric.compute()), 4)  # (|2 - 1.7| + |1 - 1.3|) / 4
        0.15
    """

    def __init__(self, bins: int = 15) -> None:
        need_bins(bins)
        super().__init__()
        self.bins = bins

    def compute(self) -> Tensor:
        """The error over all rows so far, of all processes."""
        confidence, right = self.ordered()
        rows = len(confidence)
        index = torch.arange(rows, device=confidence.device) * self.bins // rows
        return torch.bincount(index, right - confidence, self.bins).abs().sum() / rows


class ClasswiseECE(Streaming):
    """Calibration error of every class's probability, averaged over the classes.

    Args:
        classes: C; 2 for binary predictions.
        bins: R bins of equal width for each class.

    Shape: update(probs (N, ..., C), target (N, ...)), or both (N,).

    Example:
        >>> metric = ClasswiseECE(classes=2, bins=10)
        >>> metric.update(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 1, 1]))
        >>> float(metric.compute())
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
        self.add_sum("class_bin_gaps", classes, bins)
        self.add_sum("class_bin_rows")

    def update(self, probs: Prediction | Tensor, target: Tensor) -> None:
        """Take a batch."""
        rows, label = labelled(probs, target)
        if rows.shape[-1] != self.classes:
            raise ValueError(f"This ClasswiseECE is for {self.classes} classes, got probabilities of {rows.shape[-1]}.")
        index = bin_index(rows, self.bins) + self.bins * torch.arange(self.classes, device=rows.device)
        gap = torch.nn.functional.one_hot(label, self.classes) - rows.double()
        self.add_to(
            "class_bin_gaps",
            torch.bincount(index.flatten(), gap.flatten(), self.classes * self.bins).view(self.classes, -1),
        )
        self.add_to("class_bin_rows", len(rows))

    def compute(self) -> Tensor:
        """The error over all rows so far, of all processes."""
        self.need_some(self.class_bin_rows)
        return self.class_bin_gaps.abs().sum() / (self.classes * self.class_bin_rows)


class AURC(Ranked):
    """Area under the risk-coverage curve: how wrong a model is on the rows of which it is most sure. Keeps all confidences.

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
        wrong = (1 - self.ordered()[1]).cumsum(0)
        return wrong / torch.arange(1, len(wrong) + 1, device=wrong.device)

    def compute(self) -> Tensor:
        """The area over all rows so far, of all processes."""
        return self.risk().mean()

    def curve(self) -> tuple[Tensor, Tensor]:
        """Coverage k / M and the error rate among the k most confident rows, (M,) each, over all processes, which must all call it."""
        with self.sync_context():
            risk = self.risk()
        return torch.arange(1, len(risk) + 1, device=risk.device) / len(risk), risk


def need_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"At least one bin is needed, got bins={bins!r}.")
