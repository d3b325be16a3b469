"""Networks of the papers as plain torch modules: nothing in them is Bayesian until `bayesianize` makes it so."""

from slimbayes.models.convolutional import lenet as lenet
from slimbayes.models.counting import keras_count as keras_count
from slimbayes.models.dense import mlp as mlp
from slimbayes.models.recurrent import imdb_lstm as imdb_lstm
from slimbayes.models.residual import small_resnet as small_resnet
