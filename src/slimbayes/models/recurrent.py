"""The k-tied paper's LSTM: the Keras example for IMDB reviews, without its dropout.

torch gives an LSTM two bias vectors that only ever act as their sum; Keras has one. The second is held at zero here, so that
the sum trains at the optimizer's own pace.
"""

import torch
from torch import Tensor, nn

from slimbayes.models.initial import he_normal


class ReviewLSTM(nn.Module):
    """Embedding, LSTM, and one unit on the last hidden state: layers `embedding`, `lstm`, `dense`."""

    def __init__(self, vocabulary: int, embedding: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.dense = nn.Linear(units, 1)
        self._initialise(units)

    def _initialise(self, units: int) -> None:
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        for kernel in (self.lstm.weight_ih_l0, self.lstm.weight_hh_l0):
            he_normal(kernel)
        nn.init.xavier_uniform_(self.dense.weight)
        for bias in (self.lstm.bias_ih_l0, self.lstm.bias_hh_l0, self.dense.bias):
            nn.init.zeros_(bias)
        with torch.no_grad():
            self.lstm.bias_ih_l0[units : 2 * units] = (
                1.0  # gates are input, forget, cell, output: Keras opens the forget gate
            )
        self.lstm.bias_hh_l0.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        return self.dense(outputs[:, -1]).squeeze(-1)


def imdb_lstm(vocabulary: int = 20000, embedding: int = 128, units: int = 128) -> ReviewLSTM:
    """Sentiment of a review from its word indices, which the paper pads or cuts to 80.

    Shape: (B, T) word indices -> (B,) logits of a positive review.

    Example:
        >>> import torch
        >>> imdb_lstm(vocabulary=50)(torch.zeros(2, 80, dtype=torch.long)).shape
        torch.Size([2])
    """
    return ReviewLSTM(vocabulary, embedding, units)
