"""What training needs: likelihoods, the ELBO, parameter groups, schedules."""

from typing import Literal

# How draws join in a likelihood (likelihoods.py); here, where it needs no torch.
Form = Literal["average", "mixture", "probs", "logits"]
