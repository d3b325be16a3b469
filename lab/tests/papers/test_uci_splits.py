"""benchmarks/uci_splits.py and tools/naval_targets.py: splits trained side by side, and Naval's second target."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]
import naval_targets as naval  # noqa: E402
import uci_splits  # noqa: E402


def test_splits_trained_side_by_side_train_as_each_by_itself(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(uci_splits, "MEMBERS", 1)
    both = uci_splits.network("ensemble", groups=2, inputs=3, hidden=4, outputs=1)
    alone = uci_splits.network("ensemble", groups=1, inputs=3, hidden=4, outputs=1)
    for one, two in zip(alone.parameters(), both.parameters(), strict=True):
        one.data.copy_(two.data[1:])
    x, y = torch.randn(250, 2, 3), torch.randn(250, 2, 1)

    def trained(net, split):
        cut = slice(None) if split is None else slice(split, split + 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05, weight_decay=0.01)
        uci_splits.train_epoch(net, optimizer, x[:, cut].flatten(1), y[:, cut])
        return list(net.parameters())

    for one, two in zip(trained(alone, 1), trained(both, None), strict=True):
        torch.testing.assert_close(one[0], two[1])


def test_naval_gets_its_second_target_from_the_order_of_its_grid_or_is_refused():
    compressor, turbine, speed = (a.reshape(-1) for a in np.meshgrid(
        0.95 + 0.001 * np.arange(51), 0.975 + 0.001 * np.arange(26), 3.0 * np.arange(1, 10), indexing="ij"
    ))  # fmt: skip
    x = np.zeros((11934, 16))
    x[:, 1], x[:, 7] = speed, 500 - 30 * turbine - 20 * compressor + speed
    found = naval.both_targets(x, compressor)
    np.testing.assert_allclose(found, np.stack([compressor, turbine], 1), atol=1e-9)
    with pytest.raises(ValueError, match="not in the order"):
        naval.both_targets(x[::-1], compressor[::-1])


def test_scores_of_a_split_and_a_run_that_was_stopped_goes_on(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(120, 3)), np.arange(120.0)
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "yacht.npz", X=x, y=y)
    out = tmp_path / "out"
    out.mkdir()
    told = uci_splits.run("yacht", "emp", tmp_path, out, 3, 20, until=0.0)
    assert told == "yacht-emp: 1 of 3 epochs"
    for _ in range(2):
        told = uci_splits.run("yacht", "emp", tmp_path, out, 3, 20, until=0.0)
    assert not (out / "yacht-emp.json").exists()
    assert uci_splits.run("yacht", "emp", tmp_path, out, 3, 20, until=0.0).startswith(
        "yacht-emp: done"
    )
    stopped = (out / "yacht-emp.json").read_text()
    (out / "yacht-emp.json").unlink()
    uci_splits.run("yacht", "emp", tmp_path, out, 3, 20, until=np.inf)
    whole = uci_splits.json.loads((out / "yacht-emp.json").read_text())
    for name in ("rmse", "lpd"):
        np.testing.assert_allclose(
            uci_splits.json.loads(stopped)[name], whole[name], rtol=1e-6
        )
    assert len(whole["rmse"]) == 20
