"""Networks of the papers as plain torch modules: nothing in them is Bayesian until `bayesianize` makes it so.

torchvision and timm have some of them; these need neither, and have the papers' parameter counts and starts. The one
for tables is ours.
"""

from slimbayes.tables import table_net as table_net
from slimbayes_lab.models.feedforward import deep_mlp as deep_mlp
from slimbayes_lab.models.feedforward import keras_count as keras_count
from slimbayes_lab.models.feedforward import lenet as lenet
from slimbayes_lab.models.feedforward import mlp as mlp
from slimbayes_lab.models.feedforward import regression_net as regression_net
from slimbayes_lab.models.feedforward import small_cnn as small_cnn
from slimbayes_lab.models.recurrent import imdb_lstm as imdb_lstm
from slimbayes_lab.models.recurrent import mortality_lstm as mortality_lstm
from slimbayes_lab.models.resnet import pyramidnet as pyramidnet
from slimbayes_lab.models.resnet import resnet18 as resnet18
from slimbayes_lab.models.resnet import resnet50 as resnet50
from slimbayes_lab.models.resnet import small_resnet as small_resnet
from slimbayes_lab.models.resnet import wrn as wrn
