"""Networks of the papers as plain torch modules: nothing in them is Bayesian until `bayesianize` makes it so."""

from slimbayes.models.convolutional import lenet as lenet
from slimbayes.models.convolutional import small_cnn as small_cnn
from slimbayes.models.counting import keras_count as keras_count
from slimbayes.models.counting import matching_width as matching_width
from slimbayes.models.dense import deep_mlp as deep_mlp
from slimbayes.models.dense import mlp as mlp
from slimbayes.models.dense import regression_net as regression_net
from slimbayes.models.health import mortality_lstm as mortality_lstm
from slimbayes.models.pyramid import pyramidnet as pyramidnet
from slimbayes.models.recurrent import imdb_lstm as imdb_lstm
from slimbayes.models.residual import small_resnet as small_resnet
from slimbayes.models.resnet import resnet18 as resnet18
from slimbayes.models.resnet import resnet34 as resnet34
from slimbayes.models.resnet import resnet50 as resnet50
from slimbayes.models.resnet import resnet101 as resnet101
from slimbayes.models.wide import wrn as wrn
