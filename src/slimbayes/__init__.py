"""slimbayes: turn any PyTorch model into a parameter-efficient Bayesian neural net."""

from slimbayes import schedules as schedules
from slimbayes.accounting import Cost as Cost
from slimbayes.accounting import Summary as Summary
from slimbayes.accounting import estimate_cost as estimate_cost
from slimbayes.accounting import summary as summary
from slimbayes.checkpoint import CheckpointError as CheckpointError
from slimbayes.checkpoint import load as load
from slimbayes.checkpoint import save as save
from slimbayes.convert import bayesianize as bayesianize
from slimbayes.convert import debayesianize as debayesianize
from slimbayes.distributions import Cauchy as Cauchy
from slimbayes.distributions import HalfCauchy as HalfCauchy
from slimbayes.distributions import LogNormal as LogNormal
from slimbayes.distributions import Normal as Normal
from slimbayes.distributions import Point as Point
from slimbayes.distributions import Signs as Signs
from slimbayes.distributions import dropout_scale as dropout_scale
from slimbayes.layers import register_layer as register_layer
from slimbayes.objective import ELBO as ELBO
from slimbayes.objective import bernoulli as bernoulli
from slimbayes.objective import categorical as categorical
from slimbayes.objective import check_finite as check_finite
from slimbayes.objective import elbo as elbo
from slimbayes.objective import gaussian as gaussian
from slimbayes.objective import heteroscedastic_gaussian as heteroscedastic_gaussian
from slimbayes.objective import kl as kl
from slimbayes.objective import param_groups as param_groups
from slimbayes.posteriors import BatchEnsemble as BatchEnsemble
from slimbayes.posteriors import Deterministic as Deterministic
from slimbayes.posteriors import KTied as KTied
from slimbayes.posteriors import MatrixNormal as MatrixNormal
from slimbayes.posteriors import MeanField as MeanField
from slimbayes.posteriors import Rank1 as Rank1
from slimbayes.posteriors import config_from_dict as config_from_dict
from slimbayes.posteriors.base import Config as Config
from slimbayes.posteriors.priors import EmpiricalBayes as EmpiricalBayes
from slimbayes.posteriors.priors import HeNormal as HeNormal
from slimbayes.posteriors.priors import ScaleMixture as ScaleMixture
from slimbayes.posteriors.priors import TiedMean as TiedMean
from slimbayes.prediction import Prediction as Prediction
from slimbayes.prediction import predict as predict
from slimbayes.sampling import frozen as frozen
from slimbayes.sampling import members as members
from slimbayes.sampling import sample as sample

__version__ = "0.1.0"
