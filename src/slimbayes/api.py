"""The public names, one re-export per line. `import slimbayes` gives them all, and loads torch when the first one is
asked for.
"""

from slimbayes import data as data
from slimbayes import decisions as decisions
from slimbayes import diagnostics as diagnostics
from slimbayes import kernels as kernels
from slimbayes import metrics as metrics
from slimbayes import models as models
from slimbayes import plot as plot
from slimbayes.convert.bayesianize import bayesianize as bayesianize
from slimbayes.convert.bayesianize import debayesianize as debayesianize
from slimbayes.convert.checkpoint import load as load
from slimbayes.convert.checkpoint import save as save
from slimbayes.convert.members import ensemble as ensemble
from slimbayes.convert.members import keep_members as keep_members
from slimbayes.convert.summary import Cost as Cost
from slimbayes.convert.summary import Summary as Summary
from slimbayes.convert.summary import estimate_cost as estimate_cost
from slimbayes.convert.summary import summary as summary
from slimbayes.convert.trainable import Trainable as Trainable
from slimbayes.convert.trainable import trainable as trainable
from slimbayes.distributions.families import Cauchy as Cauchy
from slimbayes.distributions.families import HalfCauchy as HalfCauchy
from slimbayes.distributions.families import LogNormal as LogNormal
from slimbayes.distributions.families import LogUniform as LogUniform
from slimbayes.distributions.families import Normal as Normal
from slimbayes.distributions.families import Point as Point
from slimbayes.distributions.families import Signs as Signs
from slimbayes.distributions.priors import EmpiricalBayes as EmpiricalBayes
from slimbayes.distributions.priors import HeNormal as HeNormal
from slimbayes.distributions.priors import LaplacePrior as LaplacePrior
from slimbayes.distributions.priors import ScaleMixture as ScaleMixture
from slimbayes.distributions.priors import TiedMean as TiedMean
from slimbayes.distributions.scales import dropout_scale as dropout_scale
from slimbayes.errors import SlimbayesWarning as SlimbayesWarning
from slimbayes.files import CheckpointError as CheckpointError
from slimbayes.inference.chains import Chains as Chains
from slimbayes.inference.chains import sample_posterior as sample_posterior
from slimbayes.inference.laplace import Laplace as Laplace
from slimbayes.inference.laplace import laplace as laplace
from slimbayes.inference.linearised import predict_linearised as predict_linearised
from slimbayes.layers import register_layer as register_layer
from slimbayes.posteriors import config_from_dict as config_from_dict
from slimbayes.posteriors.configs import Recipe as Recipe
from slimbayes.posteriors.configs import recipe as recipe
from slimbayes.posteriors.configs.base import Config as Config
from slimbayes.posteriors.configs.base import Deterministic as Deterministic
from slimbayes.posteriors.configs.mixture import DropConnect as DropConnect
from slimbayes.posteriors.configs.mixture import FlowPatch as FlowPatch
from slimbayes.posteriors.configs.mixture import Mixture as Mixture
from slimbayes.posteriors.configs.mixture import ModelPatch as ModelPatch
from slimbayes.posteriors.configs.rank1 import BatchEnsemble as BatchEnsemble
from slimbayes.posteriors.configs.rank1 import JointNormal as JointNormal
from slimbayes.posteriors.configs.rank1 import Rank1 as Rank1
from slimbayes.posteriors.configs.weights import FullMatrixNormal as FullMatrixNormal
from slimbayes.posteriors.configs.weights import KTied as KTied
from slimbayes.posteriors.configs.weights import MatrixNormal as MatrixNormal
from slimbayes.posteriors.configs.weights import MeanField as MeanField
from slimbayes.posteriors.configs.weights import (
    MultivariateNormal as MultivariateNormal,
)
from slimbayes.posteriors.configs.weights import Radial as Radial
from slimbayes.posteriors.configs.whole_modules import Ensemble as Ensemble
from slimbayes.posteriors.configs.whole_modules import MCDropout as MCDropout
from slimbayes.posteriors.configs.whole_modules import MemberNorm as MemberNorm
from slimbayes.prediction.distance import Distance as Distance
from slimbayes.prediction.distance import distance as distance
from slimbayes.prediction.export import export as export
from slimbayes.prediction.norms import refresh_norms as refresh_norms
from slimbayes.prediction.predict import predict as predict
from slimbayes.prediction.prediction import Prediction as Prediction
from slimbayes.prediction.sample import fixed_draws as fixed_draws
from slimbayes.prediction.sample import materialize as materialize
from slimbayes.prediction.sample import members as members
from slimbayes.prediction.sample import sample as sample
from slimbayes.prediction.stacking import stack as stack
from slimbayes.prediction.stacking import stacking_weights as stacking_weights
from slimbayes.train import schedules as schedules
from slimbayes.train.elbo import ELBO as ELBO
from slimbayes.train.elbo import check_finite as check_finite
from slimbayes.train.elbo import elbo as elbo
from slimbayes.train.elbo import kl as kl
from slimbayes.train.likelihoods import bernoulli as bernoulli
from slimbayes.train.likelihoods import categorical as categorical
from slimbayes.train.likelihoods import gaussian as gaussian
from slimbayes.train.likelihoods import (
    heteroscedastic_gaussian as heteroscedastic_gaussian,
)
from slimbayes.train.optim import l2 as l2
from slimbayes.train.optim import param_groups as param_groups
from slimbayes.train.precision import OutputPrecision as OutputPrecision
from slimbayes.train.precision import shared_precision as shared_precision
from slimbayes.train.recorded import compiled as compiled
from slimbayes.train.recorded import recorded as recorded
from slimbayes.train.targets import check_targets as check_targets
