"""Judging predictions: how well confidence matches accuracy, and how much accuracy suffers from corrupted inputs.

Everything here takes tensors, a `Prediction` or plain numbers; nothing in the core depends on it.
"""

from slimbayes.metrics.calibration import Calibration as Calibration
from slimbayes.metrics.calibration import calibration as calibration
from slimbayes.metrics.corruption import ALEXNET as ALEXNET
from slimbayes.metrics.corruption import CorruptionErrors as CorruptionErrors
from slimbayes.metrics.corruption import corruption_errors as corruption_errors
