"""A method that a user wrote, the one of docs/adding_a_method.md: its file is all that is needed."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's method in a file."""
    page = (ROOT / "docs" / "adding_a_method.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    shown = [block for block in blocks if "import slimbayes as sb" not in block]
    (tmp_path / "one_scale.py").write_text("\n\n".join(shown))
    return tmp_path


def run(folder: Path, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_method_in_a_file_of_ones_own_has_the_kl_of_mean_field(folder: Path) -> None:
    run(
        folder,
        """
        import torch, slimbayes as sb
        from one_scale import OneScale
        from torch import nn

        layer, prior = nn.Embedding(5, 3, padding_idx=2), sb.Normal(0.2, 0.7)
        own = sb.bayesianize(layer, OneScale(prior=prior, scale_init=0.5))
        known = sb.MeanField(prior=prior, scale_init=0.5, scale_jitter=0.0)
        other = sb.bayesianize(nn.Embedding(5, 3, padding_idx=2), known)
        with torch.no_grad():
            other.weight.copy_(own.weight)
        torch.testing.assert_close(sb.kl(own), sb.kl(other))
        drawn = sb.sample(own, torch.arange(5), draws=3)
        assert torch.equal(drawn[:, 2], own.weight[2].expand(3, 3))
        assert (drawn[:, 0] != own.weight[0]).all()
        try:
            OneScale(scale_init=0.0)
        except ValueError as error:
            assert "scale_init must be positive" in str(error)
        else:
            raise AssertionError("scale_init=0 was accepted")
        """,
    )


@pytest.mark.slow
def test_a_file_is_all_that_a_method_needs(folder: Path) -> None:
    """The list of methods, what checkpoints are read by, and the choices of experiment configs come from the files."""
    shutil.copytree(ROOT / "src" / "slimbayes", folder / "slimbayes")
    shutil.move(
        folder / "one_scale.py", folder / "slimbayes" / "posteriors" / "configs"
    )
    run(
        folder,
        """
        import torch, slimbayes as sb
        from slimbayes_lab.configs.files import validate
        from slimbayes.posteriors import METHODS
        from torch import nn

        OneScale = METHODS["OneScale"]
        net = sb.bayesianize(nn.Linear(4, 3), OneScale(scale_init=0.3))
        sb.save(net, "saved", base=True)
        again = sb.load(nn.Linear(4, 3), "saved")
        x = torch.randn(6, 4)
        first, second = (sb.predict(m, x, draws=5, seed=0).samples for m in (net, again))
        assert torch.equal(first, second)

        method = {"kind": "OneScale", "prior": {"kind": "Normal", "loc": 0.0, "scale": 0.3}}
        experiment = validate({
            "name": "try",
            "data": {"name": "digits"},
            "model": {"kind": "small_cnn", "width": 8},
            "method": method,
            "train": {"epochs": 1, "optimizer": {"kind": "AdamW", "lr": 0.01}},
        })
        assert experiment.method.build() == OneScale(prior=sb.Normal(0.0, 0.3))
        """,
    )
