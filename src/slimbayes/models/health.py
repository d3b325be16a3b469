"""The rank-1 paper's network for in-hospital mortality, and the seven variants of its Table 4.

    tokens --embedding, mean over a bag--> LSTM over bags --last output--> hidden layer, ReLU6 --> logit

Starting weights are the reference code's: LSTM kernels Glorot uniform and orthogonal with the forget gate open, the
hidden layer He normal. One table of vectors serves all features; the paper has one each, static ones after the LSTM.

Sizes: B rows, T bags, L tokens in a bag, K members.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from slimbayes.distributions.families import Cauchy, Normal, Signs, dropout_scale
from slimbayes.models.feedforward import he_normal
from slimbayes.models.recurrent import start_lstm
from slimbayes.posteriors.base import Config
from slimbayes.posteriors.configs.base import Deterministic
from slimbayes.posteriors.configs.ensemble import Ensemble
from slimbayes.posteriors.configs.gaussian import MeanField
from slimbayes.posteriors.configs.rank1 import BatchEnsemble, Rank1


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
        >>> import slimbayes as sb
        >>> import torch
        >>> net = sb.bayesianize(mortality_lstm(50, units=8, hidden=8), VARIANTS["rank-1 Gaussian"])
        >>> sb.sample(net, torch.randint(0, 50, (3, 48, 10)), draws=2).shape  # 4 members
        torch.Size([8, 3])
    """
    return MortalityLSTM(vocabulary, embedding, units, hidden)


_TABLE = MeanField(prior=Normal(0.0, 1.0))  # one draw of the table for a pass, shared by members
_REST = "lstm|hidden|output"

# Table 4, with the priors and starts of Table 7 ("dropout_rate" is a rate, not a scale). Give one to `bayesianize`.
VARIANTS: dict[str, Config | Mapping[str, Config]] = {
    "deterministic": {".*": Deterministic()},
    "BatchEnsemble": {_REST: BatchEnsemble(members=4, mean_init=Signs(0.5))},
    "Bayesian embeddings": {"embedding": _TABLE},
    "fully Bayesian": {f"embedding|{_REST}": _TABLE},
    "rank-1 Gaussian": {
        "embedding": _TABLE,
        _REST: Rank1(members=4, prior=Normal(1.0, 0.1), mean_init=Signs(0.5), scale_init=dropout_scale(1e-3)),
    },
    "rank-1 Cauchy": {
        "embedding": _TABLE,
        _REST: Rank1(members=4, prior=Cauchy(0.5, 1e-4), mean_init=Signs(0.5), scale_init=dropout_scale(5e-7)),
    },
    "deep ensemble": Ensemble(members=4),
}
