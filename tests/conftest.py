"""Settings every test shares. The environment must be set before torch starts its threads."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

collect_ignore = ["fakes"]  # stand-ins for programs, run by tests


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

if device := os.environ.get("SLIMBAYES_TEST_DEVICE"):  # run the suite on a GPU: SLIMBAYES_TEST_DEVICE=cuda
    torch.set_default_device(device)
    torch.backends.cudnn.allow_tf32 = False  # its default; comparisons need full single precision
