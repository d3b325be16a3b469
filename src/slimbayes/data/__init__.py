"""Data to train on and to judge uncertainty by: augmentation and the corruptions of CIFAR-10-C and ImageNet-C, as batched tensor operations."""

from slimbayes.data.augment import pad_crop_flip as pad_crop_flip
from slimbayes.data.augment import resized_crop as resized_crop
from slimbayes.data.corruptions import CORRUPTIONS as CORRUPTIONS
from slimbayes.data.corruptions import EXTRA as EXTRA
from slimbayes.data.corruptions import corrupt as corrupt
