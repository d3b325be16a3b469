"""Faults in files that are read again: bits flipped, ends cut off, files of other runs."""

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fault_suite import TOLD, Count, fault, small_net, small_run
from fault_training import holds_one, same_tensors
from lab_configs import EVERY_STEP, experiment, weights
from slimbayes_lab.finished.predict_file import predict_file
from slimbayes_lab.report import record
from slimbayes_lab.runs.checkpoints import latest_checkpoint
from slimbayes_lab.runs.fit import fit

import slimbayes as sb

NO_SUMS = "without a manifest 1.3 % of flips of a safetensors file were refused; libraries compared have none"


def damaged(data: bytes, dice: random.Random) -> tuple[bytes, str]:
    """A file's bytes with one bit flipped, or, now and then, cut short."""
    if dice.random() < 0.1:
        size = dice.randrange(len(data))
        return data[:size], f"cut to {size}"
    bit = dice.randrange(8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed), f"bit {bit}"


def damage(
    files: list[Path], dice: random.Random, times: int, good: Callable[[], bool]
) -> Count:
    """Damage one of the files at a time; a refusal in words, or what was there before, is survival."""
    count = Count()
    for _ in range(times):
        file = dice.choice(files)
        before = file.read_bytes()
        after, what = damaged(before, dice)
        file.write_bytes(after)
        try:
            with warnings.catch_warnings(action="ignore"):
                count.add(
                    good(), f"{file.name}, {what}: read as something else in silence"
                )
        except TOLD:
            count.add(True)
        except Exception as error:
            count.add(False, f"{file.name}, {what}: {type(error).__name__}: {error}")
        finally:
            file.write_bytes(before)
    return count


@fault(
    "bit flips and cuts of the latest checkpoint",
    "refused with a warning; the one before it, whole, is used",
    NO_SUMS,
)
def damaged_checkpoints(place: Path, dice: random.Random) -> Count:
    folder = small_run(place / "run") / "checkpoints"
    newest, older = sorted(folder.glob("step-*"), reverse=True)[:2]
    shutil.copytree(older, place / "alone" / older.name)
    expected: Any = latest_checkpoint(place / "alone")
    latest: Any = latest_checkpoint(folder)

    def good() -> bool:
        found: Any = latest_checkpoint(folder)
        return any(found and same(found, one) for one in (expected, latest))

    def same(found: Any, one: Any) -> bool:
        return bool(found[1] == one[1]) and same_tensors(found[0], one[0])

    return damage(sorted(newest.iterdir()), dice, 1000, good)


@fault(
    "bit flips and cuts of saved posteriors", "refused, or the same weights", NO_SUMS
)
def damaged_posteriors(place: Path, dice: random.Random, times: int = 1000) -> Count:
    net = small_net()
    folder = place / "net"
    sb.save(net, folder, base=True)
    return damage(
        sorted(folder.iterdir()), dice, times, lambda: holds_one(folder, [net])
    )


@fault(
    "bit flips and cuts of inputs.json, which says how rows are scaled and named",
    "refused, or the same predictions",
    "a scikit-learn pickle has no checksum",
)
def damaged_inputs(place: Path, dice: random.Random) -> Count:
    run, out = small_run(place / "run"), place / "out.json"
    np.save(
        place / "x.npy", np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)
    )
    predict_file(run, place / "x.npy", out, 1, "cpu")
    expected = out.read_bytes()

    def good() -> bool:
        predict_file(run, place / "x.npy", out, 1, "cpu")
        return out.read_bytes() == expected

    return damage([run / "inputs.json"], dice, 300, good)


@fault(
    "bit flips and cuts of record.json, which the report reads",
    "refused, or the same record",
    "experiment trackers keep records without checksums",
)
def damaged_records(place: Path, dice: random.Random) -> Count:
    run = small_run(place / "run")
    expected = record.read(run)
    return damage(
        [run / "record.json"], dice, 600, lambda: record.read(run) == expected
    )


@fault(
    "the checkpoint of another run among a run's own",
    "the newest good one of its own is used, and the run ends in the same weights",
    "not promised by any library compared",
)
def foreign_checkpoints(place: Path, dice: random.Random) -> Count:
    count = Count()
    whole, other = (
        fit(experiment(seed=seed), place / f"whole-{seed}", EVERY_STEP)
        for seed in (0, 1)
    )
    for number in range(5):
        cut = shutil.copytree(whole, place / f"cut-{number}")
        for name in ("record.json", "model/manifest.json"):
            (cut / name).unlink()
        newest = sorted((cut / "checkpoints").glob("step-*"))[-1]
        theirs = dice.choice(sorted((other / "checkpoints").glob("step-*")))
        shutil.rmtree(newest)
        shutil.copytree(theirs, newest)
        shutil.rmtree(cut / "model")
        try:
            with warnings.catch_warnings(action="ignore"):
                same = weights(fit(experiment(), cut, EVERY_STEP, True)) == weights(
                    whole
                )
            count.add(same, "another end")
        except Exception as error:
            count.add(False, f"{type(error).__name__}: {error}")
    return count
