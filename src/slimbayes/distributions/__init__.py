"""Families, their divergences, and the priors built from them; all are loaded here, so that FAMILIES is complete."""

from slimbayes.distributions import families as families
from slimbayes.distributions import kl as kl
from slimbayes.distributions import priors as priors
