"""Checkpoints that are damaged, hostile, of another config, or do not fit on the disk."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_configs import CPU, EVERY_STEP, Crash, crash_after, experiment, weights
from slimbayes_lab.runs.checkpoints import (
    _read,
    latest_checkpoint,
    restore,
    save_checkpoint,
    state_of,
)
from slimbayes_lab.runs.fit import fit
from slimbayes_lab.runs.folder import RunError

from slimbayes.files import CheckpointError

pytestmark = pytest.mark.usefixtures("unchecked_fits")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = experiment()
    whole = fit(chosen, tmp_path / "whole", CPU)
    with monkeypatch.context() as patch:
        crash_after(patch, 6)
        with pytest.raises(Crash):
            fit(chosen, tmp_path / "cut", EVERY_STEP)
    kept = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    assert [p.name for p in kept] == ["step-00000005", "step-00000006"]
    file = kept[-1] / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.warns(
        UserWarning, match="Skipping a damaged checkpoint.*step-00000006"
    ):
        cut = fit(chosen, tmp_path / "cut", EVERY_STEP, resume=True)
    assert weights(cut) == weights(whole)


@pytest.mark.slow
def test_every_flipped_bit_and_every_cut_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        crash_after(patch, 1)
        with pytest.raises(Crash):
            fit(experiment(model={"width": 1}), tmp_path / "run", EVERY_STEP)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    draw = random.Random(0)
    for file in (folder / "tensors.safetensors", folder / "state.json"):
        good = file.read_bytes()
        for trial in range(120):
            bad = bytearray(good)
            if trial < 100:
                bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
            else:
                bad = bad[: draw.randrange(len(bad))]
            file.write_bytes(bad)
            with pytest.warns(UserWarning, match="damaged"):
                assert latest_checkpoint(folder.parent) is None
        file.write_bytes(good)
    assert latest_checkpoint(folder.parent) is not None


def test_checkpoints_of_another_config_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        crash_after(patch, 2)
        with pytest.raises(Crash):
            fit(experiment(), tmp_path / "run", EVERY_STEP)
    with pytest.raises(RunError, match="another config"):
        fit(experiment(seed=5), tmp_path / "run", EVERY_STEP, resume=True)
    with pytest.raises(RunError, match="--resume"):
        fit(experiment(), tmp_path / "run", EVERY_STEP)
    (tmp_path / "run" / "config.yaml").unlink()
    with (
        pytest.warns(
            UserWarning,
            match="checkpoint of another run.*step-0000000[12] has the hash",
        ),
        pytest.raises(CheckpointError, match="another config"),
    ):
        fit(experiment(seed=5), tmp_path / "run", EVERY_STEP, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("limit_kb", [30, 60])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    limit_kb: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes fail with ENOSPC from the fourth checkpoint on."""
    import errno

    real, count = Path.write_bytes, 0

    def write(file: Path, data: bytes) -> None:
        nonlocal count
        count += "checkpoints" in file.parts
        if count > 3 * 3:
            real(file, data[: limit_kb * 10])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(RunError, match="No space left on device"):
        fit(experiment(), tmp_path / "run", EVERY_STEP)
    monkeypatch.undo()
    folders = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == ["step-00000002", "step-00000003"]
    assert weights(
        fit(experiment(), tmp_path / "run", EVERY_STEP, resume=True)
    ) == weights(fit(experiment(), tmp_path / "whole", CPU))


def hostile(folder: Path, tensors: bytes, state: bytes, **manifest: Any) -> None:
    import hashlib

    folder.mkdir(parents=True)
    files = {"tensors.safetensors": tensors, "state.json": state}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    (folder / "manifest.json").write_text(
        json.dumps({"library": "slimbayes", "format": 1, "sha256": hashes} | manifest)
    )


GOOD_STATE = json.dumps({"step": 1, "curve": [], "hash": "x"}).encode()


@pytest.mark.parametrize(
    ("tensors", "state", "manifest"),
    [
        ((2**60).to_bytes(8, "little") + b"{}", GOOD_STATE, {}),
        (
            (50).to_bytes(8, "little")
            + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'.ljust(50),
            GOOD_STATE,
            {},
        ),
        (b"\x80\x04cposix\nsystem\n(S'touch canary'\ntR.", GOOD_STATE, {}),
        (b"PK\x03\x04" + b"x" * 50, GOOD_STATE, {}),
        (b"", GOOD_STATE, {}),
        (b"\x02\0\0\0\0\0\0\0{}", b"[]", {}),
        (b"\x02\0\0\0\0\0\0\0{}", b"{", {}),
        (b"\x02\0\0\0\0\0\0\0{}", b"{}", {}),
        (b"\x02\0\0\0\0\0\0\0{}", GOOD_STATE, {"format": 99}),
        (b"\x02\0\0\0\0\0\0\0{}", GOOD_STATE, {"sha256": {"../../etc/passwd": "0"}}),
        (b"\x02\0\0\0\0\0\0\0{}", GOOD_STATE, {"sha256": []}),
    ],
    ids=[
        "huge header",
        "lying shape",
        "pickle",
        "zip",
        "empty",
        "state a list",
        "state cut",
        "state empty",
        "newer format",
        "path outside",
        "hashes a list",
    ],
)
def test_hostile_checkpoints_are_refused_and_nothing_runs(
    tensors: bytes,
    state: bytes,
    manifest: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even with a manifest that fits: whoever can write files can write that too."""
    monkeypatch.chdir(tmp_path)
    hostile(tmp_path / "checkpoints" / "step-00000001", tensors, state, **manifest)
    with pytest.warns(UserWarning, match="damaged"):
        assert latest_checkpoint(tmp_path / "checkpoints") is None
    assert not (tmp_path / "canary").exists()


def test_what_an_optimizer_remembers_lies_in_memory_as_the_weights_do(
    tmp_path: Path,
) -> None:
    """Of channels-last weights it came back with channels first, and fused optimizers refuse to go on with that."""

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        network = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    network, optimizer = fresh()
    network(torch.randn(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    save_checkpoint(
        tmp_path, 1, state_of(network, optimizer, {}), {"curve": [], "hash": ""}
    )
    again, other = fresh()
    restore(_read(tmp_path / "step-00000001")[0], again, other)
    for old, new in zip(network.parameters(), again.parameters(), strict=True):
        moment = other.state[new]["momentum_buffer"]
        assert moment.stride() == new.stride() == old.stride()
        assert torch.equal(
            moment, optimizer.state[old]["momentum_buffer"]
        ) and torch.equal(old, new)
