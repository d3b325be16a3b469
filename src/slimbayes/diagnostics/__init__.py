"""Looking at a trained posterior: spectra, truncation, gradient noise, pruning and how far to trust it.

Everything here reads a converted model from outside; nothing in the core depends on it. Plots need matplotlib.
"""

from slimbayes.diagnostics.check import Check as Check
from slimbayes.diagnostics.check import check as check
from slimbayes.diagnostics.prior_plots import induced_prior as induced_prior
from slimbayes.diagnostics.prior_plots import plot_induced_priors as plot_induced_priors
from slimbayes.diagnostics.psis import KHat as KHat
from slimbayes.diagnostics.psis import k_hat as k_hat
from slimbayes.diagnostics.psis import log_ratios as log_ratios
from slimbayes.diagnostics.psis import pareto_k as pareto_k
from slimbayes.diagnostics.snr import GradientSNR as GradientSNR
from slimbayes.diagnostics.snr import prune as prune
from slimbayes.diagnostics.spectra import SiteSpectrum as SiteSpectrum
from slimbayes.diagnostics.spectra import Spectrum as Spectrum
from slimbayes.diagnostics.spectra import plot_scales as plot_scales
from slimbayes.diagnostics.spectra import plot_spectrum as plot_spectrum
from slimbayes.diagnostics.spectra import spectrum as spectrum
from slimbayes.diagnostics.spectra import truncate as truncate
from slimbayes.diagnostics.spectra import truncation_errors as truncation_errors
