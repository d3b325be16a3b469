"""Estimators for scikit-learn: Bayesian neural nets for tables, in pipelines, searches and cross-validation.

from slimbayes.sklearn import BayesClassifier, BayesRegressor
"""

from slimbayes.sklearn.estimators import BayesClassifier as BayesClassifier
from slimbayes.sklearn.estimators import BayesRegressor as BayesRegressor
