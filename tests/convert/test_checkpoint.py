"""Checkpoints: what is refused, what comes back, what never runs code."""

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.convert.checkpoint import read_config


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return sb.save(sb.bayesianize(plain(), sb.Rank1(members=2)), tmp_path / "posterior")


def test_holds_the_posterior_alone_in_the_named_files(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == [
        "config.json",
        "manifest.json",
        "posterior.safetensors",
    ]
    from safetensors import safe_open

    with safe_open(saved / "posterior.safetensors", "pt") as file:
        assert file.keys() and all(".posterior." in f".{name}" for name in file.keys())  # noqa: SIM118
    assert oct(saved.stat().st_mode & 0o777) == "0o755"


@pytest.mark.slow
def test_every_bit_flip_and_truncation_is_refused(saved: Path) -> None:
    """R4: safetensors alone loads almost all of them silently wrong."""
    chance = random.Random(0)
    base = plain()
    for name in ("posterior.safetensors", "config.json", "manifest.json"):
        data = (saved / name).read_bytes()
        bits = [chance.randrange(len(data) * 8) for _ in range(300)]
        cuts = [chance.randrange(len(data)) for _ in range(30)]
        damaged = [
            data[: b // 8] + bytes([data[b // 8] ^ 1 << b % 8]) + data[b // 8 + 1 :]
            for b in bits
        ] + [data[:c] for c in cuts]
        for bad in damaged:
            if name == "manifest.json" and _same_json(bad, data):
                continue  # a flip in white space
            (saved / name).write_bytes(bad)
            with pytest.raises(sb.CheckpointError):
                sb.load(base, saved)
        (saved / name).write_bytes(data)
    assert type(base[0]) is nn.Conv2d and not hasattr(base, "_slimbayes")
    sb.load(base, saved)


def _same_json(one: bytes, two: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(two)
    except ValueError:
        return False


def test_a_file_of_another_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    torch.manual_seed(9)
    other = sb.save(
        sb.bayesianize(plain(), sb.Rank1(members=2, scale_init=0.3)), tmp_path / "other"
    )
    (saved / "posterior.safetensors").write_bytes(
        (other / "posterior.safetensors").read_bytes()
    )
    with pytest.raises(
        sb.CheckpointError,
        match=r"posterior\.safetensors is damaged: its sha256 differs",
    ):
        sb.load(plain(), saved)


def test_a_newer_format_is_named(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(
        sb.CheckpointError,
        match="has format 99; this version of slimbayes reads format 1",
    ):
        sb.load(plain(), saved)


def test_a_manifest_cannot_point_outside_its_directory(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["sha256"]["../secret"] = "0" * 64
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(sb.CheckpointError, match="is damaged"):
        sb.load(plain(), saved)


def _resign(folder: Path, name: str, data: bytes) -> None:
    """Replace a file and make the manifest agree: a hostile checkpoint, not a damaged one."""
    import hashlib

    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("method", ["os.system", "Rank1; import os", "__import__"])
def test_a_config_can_name_only_known_methods(saved: Path, method: str) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["conversions"][0]["groups"][0]["config"]["kind"] = method
    _resign(saved, "config.json", json.dumps(config).encode())
    base = plain()
    with pytest.raises(sb.CheckpointError, match="Unknown method"):
        sb.load(base, saved)
    assert type(base[0]) is nn.Conv2d


def test_a_pickle_in_place_of_tensors_is_refused_unread(
    saved: Path, tmp_path: Path
) -> None:
    import pickle

    class Canary:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "canary"),)

    _resign(saved, "posterior.safetensors", pickle.dumps(Canary()))
    with pytest.raises(sb.CheckpointError, match="not a valid safetensors file"):
        sb.load(plain(), saved)
    assert not (tmp_path / "canary").exists()


def test_other_base_weights_are_refused_unless_meant(saved: Path) -> None:
    other = plain()
    nn.init.zeros_(other[3].bias)
    with pytest.raises(
        sb.CheckpointError,
        match="right shapes but other weights .* check_base='structure'",
    ):
        sb.load(other, saved)
    assert type(other[0]) is nn.Conv2d
    assert type(sb.load(other, saved, check_base="structure")[0]) is not nn.Conv2d


def test_running_statistics_count_as_base_weights(saved: Path) -> None:
    other = plain()
    other(torch.randn(8, 1, 4, 4))  # moves the batch norm's buffers
    with pytest.raises(sb.CheckpointError, match="other weights"):
        sb.load(other, saved)


def test_another_architecture_is_named_layer_by_layer(saved: Path) -> None:
    other = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5)
    )
    with pytest.raises(
        sb.CheckpointError,
        match=r"3\.bias is \[5\] but \[3\] is wanted; 3\.weight is \[5, 16\]",
    ):
        sb.load(other, saved)
    with pytest.raises(sb.CheckpointError, match=r"not the one.*it lacks 1\.bias"):
        sb.load(nn.Sequential(nn.Linear(3, 3)), saved)


def test_a_converted_model_is_refused(saved: Path) -> None:
    with pytest.raises(sb.CheckpointError, match="Call debayesianize first"):
        sb.load(sb.bayesianize(plain(), sb.Rank1()), saved)


def test_nan_factors_are_not_saved(tmp_path: Path) -> None:
    model = sb.bayesianize(plain(), sb.Rank1(members=2))
    with torch.no_grad():
        model[3].posterior["weight"].s.loc[0, 0, 3] = float("nan")
    with pytest.raises(
        FloatingPointError,
        match=r"3\.weight: 1 of 32 values of its posterior's s\.loc are NaN .* lower the learning rate",
    ):
        sb.save(model, tmp_path / "posterior")
    assert not (tmp_path / "posterior").exists()


def test_base_weights_travel_when_asked_and_tied_ones_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    model = sb.bayesianize(Tied(), sb.MeanField(), include=".*")
    path = sb.save(model, tmp_path / "posterior", base=True)
    again = sb.load(Tied(), path)  # other weights: the checkpoint brings its own
    assert again.head.weight is again.embed.weight
    assert (
        again.head.posterior["weight"] is again.embed.posterior["weight"]
    )  # one weight, one posterior
    assert torch.equal(again.embed.weight, model.embed.weight)
    assert (path / "base.safetensors").stat().st_size < 2 * 20 * 8 * 4


def test_mixed_methods_and_layouts_come_back(tmp_path: Path) -> None:
    base = nn.ModuleDict(
        {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)}
    )
    model = sb.bayesianize(
        copy.deepcopy(base),
        {
            "a": sb.Rank1(members=2, prior=sb.Cauchy(1.0, 0.01)),
            "b": sb.BatchEnsemble(members=3),
        },
        batch_dim=1,
    )
    again = sb.load(base, sb.save(model, tmp_path / "posterior"))
    assert again._slimbayes.batch_dim == 1 and type(again.c) is nn.Linear
    assert [d.config for d in again._slimbayes.decisions] == [
        d.config for d in model._slimbayes.decisions
    ]
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            again.state_dict().values(), model.state_dict().values(), strict=True
        )
    )


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(sb.CheckpointError, match="is not a checkpoint directory"):
        sb.load(plain(), tmp_path / "nowhere")


def test_modules_to_be_saved_are_names_or_the_config_is_damaged(tmp_path: Path) -> None:
    record = {
        "module": "",
        "batch_dim": None,
        "saved": ["head", 3],
        "heads": [],
        "frozen": False,
        "groups": [],
    }
    data = json.dumps(
        {"conversions": [record], "base": {"shapes": {}, "sha256": ""}}
    ).encode()
    with pytest.raises(
        sb.CheckpointError, match=r"conversions\.0\.saved\.1 must be str, got 3"
    ):
        read_config(data, tmp_path / "config.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")]
)
def test_wrapped_models_are_converted_saved_and_loaded_inside(
    wrap: Any, tmp_path: Path
) -> None:
    plain, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).eval(), torch.randn(5, 4)
    wrapped = wrap(copy.deepcopy(plain)).eval()
    assert sb.bayesianize(wrapped, sb.Rank1(members=2), include="1") is wrapped
    path = sb.save(wrapped, tmp_path / "posterior")
    wanted = sb.predict(wrapped, x, seed=0).probs
    for base in (plain, wrap(copy.deepcopy(plain)).eval()):
        torch.testing.assert_close(
            sb.predict(sb.load(base, path), x, seed=0).probs, wanted
        )
