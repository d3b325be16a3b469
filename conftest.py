"""Settings every test shares. The environment must be set before torch starts its threads."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest
import torch

# torch's graphs make many objects and few cycles. Looking for them seldom saves some 4 % of a processor's time: sums of
# seven pairs of runs on a busy machine, whose differences went from 12 % less to 7 % more; that was with 100,000. With
# 400,000 the collector itself took 1.3 of 47 seconds instead of 1.8 of 44, and the process 60 MiB more.
gc.set_threshold(400_000, 20, 20)

if (
    not torch.cuda.is_available()
):  # seeding would write down the stack for devices that may start later: .45 ms a call
    for other in (torch.cuda, torch.xpu, torch.mtia):
        other.manual_seed_all = lambda seed: None  # type: ignore[assignment]

# How long guards take is measured after every compilation, with the processor's caches emptied first: .1 s.
torch._C._dynamo.guards.profile_guard_manager = lambda *args: 0.0

os.fsync = lambda file: (
    None
)  # no test cuts the power, and a run of the lab waits some thirty times for the disk


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-contract",
        action="store_true",
        help="every method x layer x property, not a covering array",
    )


# Of docstrings.
SLOW_EXAMPLES = (
    "slimbayes.sklearn.estimators.",
    "slimbayes.prediction.export.",
    "slimbayes.train.recorded.compiled",
)


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(SLOW_EXAMPLES):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: no collection need look at it again


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between files too: else every collection that a library asks for goes through all that the tests before it left,
    which is most of a second after some thousands."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect(1)
        gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


if device := os.environ.get(
    "SLIMBAYES_TEST_DEVICE"
):  # run the suite on a GPU: SLIMBAYES_TEST_DEVICE=cuda
    torch.set_default_device(device)
    torch.backends.cudnn.allow_tf32 = (
        False  # its default; comparisons need full single precision
    )


@pytest.fixture
def last_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Posteriors show the draws of the last pass after it has ended, for tests that write them out by hand."""
    from slimbayes.engine import passes
    from slimbayes.posteriors.base import Posterior

    last: dict[str, passes.Pass] = {}
    run = passes.run

    def recording(new: passes.Pass, *args: object, **kwargs: object) -> object:
        if not new.probing:
            last.update(dict.fromkeys(new.noise, new))
        return run(new, *args, **kwargs)

    monkeypatch.setattr(passes, "run", recording)
    monkeypatch.setattr(
        Posterior,
        "current",
        property(
            lambda posterior: passes.pass_of(posterior.key) or last[posterior.key]
        ),
    )
