"""The k-tied paper's LSTM: the Keras example for IMDB reviews, without its dropout."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.models.feedforward import he_normal

Start = Callable[[Tensor], Any]  # fills a tensor in place


def start_lstm(lstm: nn.LSTM, kernel: Start, recurrent_kernel: Start) -> None:
    """Start an LSTM of one layer as Keras does: biases at zero, but for an open forget gate.

    torch has two bias vectors that only ever act as their sum, Keras has one: the second is held at zero, so that the
    sum trains at the optimizer's own pace.

    Example:
        >>> lstm = nn.LSTM(3, 1)
        >>> start_lstm(lstm, he_normal, he_normal)
        >>> lstm.bias_ih_l0.tolist(), lstm.bias_hh_l0.requires_grad
        ([0.0, 1.0, 0.0, 0.0], False)
    """
    inputs, hidden, bias, idle_bias = lstm.parameters()
    kernel(inputs)
    recurrent_kernel(hidden)
    nn.init.zeros_(bias)
    nn.init.zeros_(idle_bias).requires_grad_(False)
    with torch.no_grad():
        bias[lstm.hidden_size : 2 * lstm.hidden_size] = 1.0  # gates are input, forget, cell, output


class ReviewLSTM(nn.Module):
    """Embedding, LSTM, and one unit on the last hidden state: layers `embedding`, `lstm`, `dense`."""

    def __init__(self, vocabulary: int, embedding: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.dense = nn.Linear(units, 1)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        start_lstm(self.lstm, he_normal, he_normal)
        nn.init.xavier_uniform_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

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
