"""Families, their divergences, and the priors built from them. Families and priors are loaded here, so that FAMILIES is
complete; neither needs torch before a tensor comes in.
"""

from slimbayes.distributions import families as families
from slimbayes.distributions import priors as priors
