"""Data to train on and to judge uncertainty by: readers for what users have, batched augmentation, the corruptions of CIFAR-10-C and ImageNet-C."""

from slimbayes.data.adapters import as_split as as_split
from slimbayes.data.augment import pad_crop_flip as pad_crop_flip
from slimbayes.data.augment import resized_crop as resized_crop
from slimbayes.data.corruptions import CORRUPTIONS as CORRUPTIONS
from slimbayes.data.corruptions import EXTRA as EXTRA
from slimbayes.data.corruptions import corrupt as corrupt
from slimbayes.data.dataset import Dataset as Dataset
from slimbayes.data.dataset import Split as Split
from slimbayes.data.datasets import available as available
from slimbayes.data.datasets import check as check
from slimbayes.data.datasets import load as load
from slimbayes.data.datasets import prepare as prepare
from slimbayes.data.folders import ImageFolder as ImageFolder
from slimbayes.data.health import Buckets as Buckets
from slimbayes.data.health import Events as Events
from slimbayes.data.health import Stays as Stays
from slimbayes.data.health import bag as bag
from slimbayes.data.health import mortality as mortality
from slimbayes.data.mimic import mimic3 as mimic3
from slimbayes.data.mimic import mimic4 as mimic4
from slimbayes.data.physionet import physionet2012 as physionet2012
from slimbayes.data.shift import feature_shift as feature_shift
from slimbayes.data.shift import label_shift as label_shift
from slimbayes.data.shift import rotate as rotate
from slimbayes.data.tables import Regression as Regression
from slimbayes.data.tables import standard_split as standard_split
