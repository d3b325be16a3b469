"""Give the benchmark's file of the Naval set its second target, the decay of the turbine.

    python tools/naval_targets.py DATA/uci/naval-propulsion-plant.npz OUT/uci/naval-propulsion-plant.npz

The benchmark of Hernandez-Lobato & Adams (2015) keeps one target of two, the decay of the compressor; the EMP paper's
Tables 12 and 13 have both. The set is a simulation on a grid, in whose order the file is: 51 compressor decays from
0.95 to 1, each with 26 turbine decays from 0.975 to 1, each at 9 speeds. So the second target follows from a row's
place; a file whose rows are in another order is refused.
"""

import sys
from pathlib import Path

import numpy as np

_COMPRESSOR, _TURBINE, _SPEEDS = 51, 26, 9
_SPEED, _TEMPERATURE = (
    1,
    7,
)  # columns: ship speed, and temperature at the turbine's exit, which falls with either decay


def both_targets(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compressor and turbine decay of each row, (11934, 2), from features (11934, 16) and the first of them."""
    grid = (_COMPRESSOR, _TURBINE, _SPEEDS)
    if x.shape != (np.prod(grid), 16) or y.size != len(x):
        raise ValueError(
            f"The Naval set has {np.prod(grid)} rows of 16 features, got {x.shape} and {y.shape}."
        )
    compressor = np.round(0.95 + 0.001 * np.arange(_COMPRESSOR), 3)
    turbine = np.round(0.975 + 0.001 * np.arange(_TURBINE), 3)
    speeds, hot = x[:, _SPEED].reshape(grid), x[:, _TEMPERATURE].reshape(grid)
    in_order = (
        np.allclose(y.reshape(grid), compressor[:, None, None], atol=1e-6)
        and np.ptp(speeds, (0, 1)).max() == 0
    )
    if not in_order or not (np.diff(hot.mean((0, 2))) < 0).all():
        raise ValueError(
            "The rows of this file are not in the order of the published grid: its second target is lost."
        )
    return np.stack(
        [y.reshape(-1), np.broadcast_to(turbine[None, :, None], grid).reshape(-1)], 1
    )


def main(source: Path, target: Path) -> None:
    with np.load(source, allow_pickle=False) as arrays:
        found = dict(arrays)
    found["y"] = both_targets(found["X"], found["y"])
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
