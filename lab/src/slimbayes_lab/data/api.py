"""The public names of this package, which `slimbayes_lab.data` looks up when one is first asked for."""

from slimbayes_lab.data.catalog import available as available
from slimbayes_lab.data.catalog import check as check
from slimbayes_lab.data.catalog import load as load
from slimbayes_lab.data.catalog import load_bags as load_bags
from slimbayes_lab.data.catalog import prepare as prepare
from slimbayes_lab.data.corruptions import CORRUPTIONS as CORRUPTIONS
from slimbayes_lab.data.corruptions import corrupt as corrupt
from slimbayes_lab.data.dataset import Dataset as Dataset
from slimbayes_lab.data.dataset import Split as Split
from slimbayes_lab.data.dataset import as_split as as_split
from slimbayes_lab.data.events import Buckets as Buckets
from slimbayes_lab.data.events import Events as Events
from slimbayes_lab.data.events import bag as bag
from slimbayes_lab.data.folders import ImageFolder as ImageFolder
from slimbayes_lab.data.folders import pad_crop_flip as pad_crop_flip
from slimbayes_lab.data.folders import resized_crop as resized_crop
from slimbayes_lab.data.mimic import mimic3 as mimic3
from slimbayes_lab.data.physionet import physionet2012 as physionet2012
from slimbayes_lab.data.prepared import save as save
from slimbayes_lab.data.stays import Stays as Stays
from slimbayes_lab.data.stays import mortality as mortality
from slimbayes_lab.data.uci import Regression as Regression
from slimbayes_lab.data.uci import standard_split as standard_split
