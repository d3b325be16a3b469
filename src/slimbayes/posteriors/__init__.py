"""A Posterior for each method, one in a file; configs/ has what users choose about them, which needs no torch."""

from slimbayes.posteriors.configs import METHODS as METHODS
from slimbayes.posteriors.configs import config_from_dict as config_from_dict
