"""The public names of this package, which `slimbayes.data` looks up when one is first asked for."""

from slimbayes.data.catalog import available as available
from slimbayes.data.catalog import check as check
from slimbayes.data.catalog import load as load
from slimbayes.data.catalog import load_bags as load_bags
from slimbayes.data.catalog import prepare as prepare
from slimbayes.data.corruptions import CORRUPTIONS as CORRUPTIONS
from slimbayes.data.corruptions import corrupt as corrupt
from slimbayes.data.dataset import Dataset as Dataset
from slimbayes.data.dataset import Split as Split
from slimbayes.data.dataset import as_split as as_split
from slimbayes.data.events import Buckets as Buckets
from slimbayes.data.events import Events as Events
from slimbayes.data.events import bag as bag
from slimbayes.data.folders import ImageFolder as ImageFolder
from slimbayes.data.folders import pad_crop_flip as pad_crop_flip
from slimbayes.data.folders import resized_crop as resized_crop
from slimbayes.data.mimic import mimic3 as mimic3
from slimbayes.data.physionet import physionet2012 as physionet2012
from slimbayes.data.prepared import save as save
from slimbayes.data.stays import Stays as Stays
from slimbayes.data.stays import mortality as mortality
from slimbayes.data.uci import Regression as Regression
from slimbayes.data.uci import standard_split as standard_split
