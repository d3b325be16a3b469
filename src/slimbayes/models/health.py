"""The rank-1 paper's network for in-hospital mortality, whose seven variants are `experiments/rank1/table4.yaml`.

    tokens --embedding, mean over a bag--> LSTM over bags --last output--> hidden layer, ReLU6 --> logit

Starting weights are the reference code's: LSTM kernels Glorot uniform and orthogonal with the forget gate open, the
hidden layer He normal. One table of vectors serves all features; the paper has one each, static ones after the LSTM.

Sizes: B rows, T bags, L tokens in a bag.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.models.feedforward import he_normal
from slimbayes.models.recurrent import start_lstm


class MortalityLSTM(nn.Module):
    """Layers `embedding`, `lstm`, `hidden`, `output`. Token 0 is padding; a bag of nothing else is a zero vector."""

    def __init__(self, vocabulary: int, embedding: int, units: int, hidden: int) -> None:
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


def mortality_lstm(vocabulary: int, embedding: int = 32, units: int = 512, hidden: int = 512) -> MortalityLSTM:
    """In-hospital mortality from bags of tokens, oldest bag first; sizes as the paper's Gaussian rank-1 model.

    Shape: (B, T, L) token ids, 0 for padding -> (B,) logits of death.

    Example:
        >>> import torch
        >>> mortality_lstm(50, units=8, hidden=8)(torch.randint(0, 50, (3, 48, 10))).shape
        torch.Size([3])
    """
    return MortalityLSTM(vocabulary, embedding, units, hidden)
