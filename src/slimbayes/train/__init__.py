"""What training needs: likelihoods, the ELBO, parameter groups, schedules."""

from typing import Literal

# Which likelihood, and how draws join in it (likelihoods.py); here, where they need no torch.
LikelihoodName = Literal[
    "categorical", "bernoulli", "gaussian", "heteroscedastic_gaussian"
]
Form = Literal["average", "mixture", "probs", "logits"]
