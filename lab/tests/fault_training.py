"""Faults while something is trained or written: kill -9 and full disks."""

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import forks
import numpy as np
import torch
from fault_suite import (
    Answer,
    Count,
    ask,
    entries,
    fault,
    small_net,
    small_run,
    stopwatch,
)
from lab_configs import CPU, EVERY_STEP, METHODS, dense, experiment, weights
from slimbayes_lab.finished.predict_file import predict_file
from slimbayes_lab.report import record, write_page
from slimbayes_lab.runs.fit import fit

import slimbayes as sb

DISK = ("could not be", "cannot be", "no space", "too large", "full")


def ends_alike(cut: Path, whole: Path) -> bool:
    """Whether a run ended as another did: its weights bit for bit, its losses, its record."""
    texts = all(
        (cut / name).read_bytes() == (whole / name).read_bytes()
        for name in ("metrics.csv", "steps.csv")
    )
    return (
        weights(cut) == weights(whole)
        and texts
        and record.read(cut).digest == record.read(whole).digest
    )


@fault(
    "kill -9 while `fit` runs, at any moment, 15 methods",
    "`--resume` ends in the same weights bit for bit, the same losses and the same record",
    "Lightning's Trainer and accelerate, as shipped, differ from the first resumed step on (by 0.14 and 0.025 "
    "in the loss)",
)
def kill_fit(place: Path, dice: random.Random) -> Count:
    count = Count()
    for name, method in METHODS.items():
        chosen, passed = (
            experiment(method=method, augment={"kind": "pad_crop_flip", "pad": 1}),
            stopwatch(),
        )
        whole, cut = fit(chosen, place / name / "whole", CPU), place / name / "cut"
        seconds, kills = passed(), 0
        while kills < 4:
            child = forks.start(fit, chosen, cut, EVERY_STEP, True)
            child.join(dice.uniform(0, 1.2 * seconds))
            if child.exitcode is None:
                child.kill()
                child.join()
                kills += 1
            elif kills < 4:
                shutil.rmtree(cut)  # it had finished: from the beginning
        done = forks.exit_codes(
            [forks.start(fit, chosen, cut, EVERY_STEP, True)], 60
        ) == [0]
        count.add(
            done and ends_alike(cut, whole),
            f"{name}: another end after {kills} kills",
            kills,
        )
    return count


def until_sync(number: int, run: Any, *args: Any) -> None:
    """Call a function; kill -9 comes when it syncs a file for the n-th time, which is in the middle of a write."""
    real, left = os.fsync, [number]

    def sync(handle: int) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        real(handle)

    os.fsync = sync
    run(*args)


@fault(
    "kill -9 inside a write of `fit`",
    "as above, and the next start sweeps what the killed one left",
    "none of the libraries compared sweeps or says what is left",
)
def kill_write(place: Path, dice: random.Random) -> Count:
    count, chosen = Count(), experiment()
    whole = fit(chosen, place / "whole", EVERY_STEP)
    for number in sorted(dice.sample(range(1, 60), 12)):
        cut = place / str(number)
        ask(until_sync, number, fit, chosen, cut, EVERY_STEP)
        fit(chosen, cut, EVERY_STEP, True)
        left = {str(p.relative_to(cut)) for p in cut.rglob(".*")} - {".slimbayes"}
        same = ends_alike(cut, whole)
        count.add(
            same and not left,
            f"sync {number}: left {sorted(left)}"
            if same
            else f"sync {number}: another end",
        )
    return count


def same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[name], two[name]) for name in one
    )


def holds_one(folder: Path, nets: list[Any]) -> bool:
    """Whether a folder holds one of these networks, every bit of it."""
    found = sb.load(dense(3), folder).state_dict()
    return any(same_tensors(found, net.state_dict()) for net in nets)


def save_for_ever(nets: list[Any], folder: Path) -> None:
    while True:
        for net in nets:
            sb.save(net, folder, base=True)


@fault(
    "kill -9 inside `save`",
    "the folder loads and holds what was there or what was to come",
    "`torch.save` leaves part of a file",
)
def kill_save(place: Path, dice: random.Random) -> Count:
    nets, folder, count = [small_net(1), small_net(2)], place / "net", Count()
    sb.save(nets[0], folder, base=True)
    for number in range(100):
        child = forks.start(save_for_ever, nets, folder)
        child.join(dice.uniform(0.01, 0.08))
        child.kill()
        child.join()
        found = ask(holds_one, folder, nets)
        count.add(found.value is True, f"kill {number}: {found}")
    left = len(entries(place) - {"net"})
    sb.save(nets[0], folder, base=True)
    count.figures["folders left before and after the next save"] = [
        left,
        len(entries(place) - {"net"}),
    ]
    return count


@fault(
    "a killed `save` leaves drafts",
    "the next `save` sweeps them",
    "none of the libraries compared sweeps or says what is left",
)
def swept_save(place: Path, dice: random.Random) -> Count:
    net, count = small_net(), Count()
    for number in range(1, 6):
        folder = place / str(number) / "net"
        folder.parent.mkdir()
        ask(until_sync, number, sb.save, net, folder)
        sb.save(net, folder)
        count.add(
            entries(folder.parent) == {"net"} and len(entries(folder)) == 3,
            f"sync {number}: left {sorted(entries(folder.parent) | entries(folder))}",
        )
    return count


# --- full disks: writes fail once a file has a random size ---


@fault(
    "a full disk in `fit`",
    "an error that names the file; with room again `--resume` ends in the same weights",
    "`torch.save` leaves part of a file; safetensors leaves the old file as it was",
)
def full_disk_fit(place: Path, dice: random.Random) -> Count:
    count, chosen = Count(), experiment()
    whole = fit(chosen, place / "whole", EVERY_STEP)
    largest = max(
        p.stat().st_size for p in (whole / "checkpoints").rglob("*") if p.is_file()
    )
    for number in range(15):
        limit, cut = dice.randrange(largest), place / str(number)
        answer = ask(fit, chosen, cut, EVERY_STEP, file_size=limit)
        told = answer.refused(*DISK) and str(cut) in answer.message
        same = forks.exit_codes(
            [forks.start(fit, chosen, cut, EVERY_STEP, True)], 60
        ) == [0] and ends_alike(cut, whole)
        count.add(
            told and same,
            f"{limit} bytes: {answer}" if same else f"{limit} bytes: another end",
        )
    return count


def full_disk(
    place: Path, dice: random.Random, write: Any, out: Path, times: int
) -> Count:
    """A file or folder is written twice, the second time on a full disk: it must be as it was, with an error."""
    count = Count()
    write()
    size = (
        out.stat().st_size
        if out.is_file()
        else max(p.stat().st_size for p in out.iterdir())
    )
    before, around = content(out), entries(out.parent)
    for _ in range(times):
        limit = dice.randrange(size)
        answer: Answer = ask(write, file_size=limit)
        kept = content(out) == before and entries(out.parent) == around
        told = answer.refused(*DISK) and out.name in answer.message
        count.add(
            kept and told,
            f"{out.name}, {limit} bytes: {answer}{'' if kept else '; it changed'}",
        )
    return count


def content(out: Path) -> Any:
    return (
        out.read_bytes()
        if out.is_file()
        else {p.name: p.read_bytes() for p in sorted(out.iterdir())}
    )


@fault(
    "a full disk in `save`",
    "an error that names the file; what was there stays",
    "safetensors alone does so for one file; `torch.save` leaves part of one",
)
def full_disk_save(place: Path, dice: random.Random) -> Count:
    net = small_net()
    return full_disk(
        place, dice, lambda: sb.save(net, place / "net", base=True), place / "net", 30
    )


@fault(
    "a full disk in `predict -o`: csv, json, npz",
    "an error that names the file; what was there stays",
    "numpy's and csv's writers leave part of a file",
)
def full_disk_predict(place: Path, dice: random.Random) -> Count:
    run, total = small_run(place / "run"), Count()
    np.save(
        place / "x.npy",
        np.random.default_rng(0).random((40, 1, 8, 8), dtype=np.float32),
    )
    for end in ("csv", "json", "npz"):
        (place / end).mkdir()
        out = place / end / f"out.{end}"
        count = full_disk(
            place,
            dice,
            lambda out=out: predict_file(run, place / "x.npy", out, 2, "cpu"),
            out,
            10,
        )
        total.injected, total.survived = (
            total.injected + count.injected,
            total.survived + count.survived,
        )
        total.notes += count.notes[:2]
    return total


@fault(
    "a full disk in `report`", "an error that names the file; what was there stays", "-"
)
def full_disk_report(place: Path, dice: random.Random) -> Count:
    run = small_run(place / "run")
    return full_disk(
        place,
        dice,
        lambda: write_page([run], place / "page.html"),
        place / "page.html",
        10,
    )
