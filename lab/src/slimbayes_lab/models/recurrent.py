"""LSTMs of the papers: for IMDB reviews, the Keras example without its dropout (k-tied Normal), and for in-hospital
mortality (rank-1 nets), whose seven variants are `lab/experiments/rank1/table4.yaml`:

    tokens --embedding, mean over a bag--> LSTM over bags --last output--> hidden layer, ReLU6 --> logit

Its starting weights are the reference code's: LSTM kernels Glorot uniform and orthogonal with the forget gate open, the
hidden layer He normal. One table of vectors serves all features; the paper has one each, static ones after the LSTM.

Sizes: B rows, T words or bags, L tokens in a bag.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes_lab.models.feedforward import he_normal

Start = Callable[[Tensor], Any]  # fills a tensor in place


def start_lstm(lstm: nn.LSTM, kernel: Start, recurrent_kernel: Start) -> None:
    """Start an LSTM of one layer as Keras does: biases at zero, but for an open forget gate.

    torch has two bias vectors that only ever act as their sum, Keras has one: the second is held at zero, so that the
    sum trains at the optimizer's own pace.
    """
    inputs, hidden, bias, idle_bias = lstm.parameters()
    kernel(inputs)
    recurrent_kernel(hidden)
    nn.init.zeros_(bias)
    nn.init.zeros_(idle_bias).requires_grad_(False)
    with torch.no_grad():
        bias[lstm.hidden_size : 2 * lstm.hidden_size] = (
            1.0  # gates are input, forget, cell, output
        )


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


def imdb_lstm(
    vocabulary: int = 20000, embedding: int = 128, units: int = 128
) -> ReviewLSTM:
    """Sentiment of a review from its word indices, which the paper pads or cuts to 80.

    Shape: (B, T) word indices -> (B,) logits of a positive review.

    Example:
        >>> imdb_lstm(vocabulary=50)(torch.zeros(2, 80, dtype=torch.long)).shape
        torch.Size([2])
    """
    return ReviewLSTM(vocabulary, embedding, units)


class MortalityLSTM(nn.Module):
    """Layers `embedding`, `lstm`, `hidden`, `output`. Token 0 is padding; a bag of nothing else is a zero vector."""

    def __init__(
        self, vocabulary: int, embedding: int, units: int, hidden: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.hidden = nn.Linear(units, hidden)
        self.output = nn.Linear(hidden, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start all weights anew; deep ensembles start their members with it."""
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        start_lstm(self.lstm, nn.init.xavier_uniform_, nn.init.orthogonal_)
        he_normal(self.hidden.weight)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.output.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        # Masked by hand: a drawn table has no zero row for padding.
        kept = (tokens != 0).unsqueeze(-1)
        vectors = self.embedding(tokens)
        bags = (vectors * kept).sum(-2) / kept.sum(-2).clamp_min(1)
        outputs, _ = self.lstm(bags)
        return self.output(F.relu6(self.hidden(outputs[:, -1]))).squeeze(-1)


def mortality_lstm(
    vocabulary: int, embedding: int = 32, units: int = 512, hidden: int = 512
) -> MortalityLSTM:
    """In-hospital mortality from bags of tokens, oldest bag first; sizes as the paper's Gaussian rank-1 model.

    Shape: (B, T, L) token ids, 0 for padding -> (B,) logits of death.

    Example:
        >>> mortality_lstm(50, units=8, hidden=8)(torch.randint(0, 50, (3, 48, 10))).shape
        torch.Size([3])
    """
    return MortalityLSTM(vocabulary, embedding, units, hidden)
