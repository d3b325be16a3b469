"""The state of a training run between two steps: safetensors and JSON, whole or not there, a sha256 for each file.

    checkpoints/step-00000120/   tensors.safetensors (network, optimizer, losses of the epoch), state.json

No state of a random generator is in it: noise and order are functions of the step. Of sharded models every
process takes part in saving and loading, and the file holds whole tensors, so that it fits any number of processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn

from slimbayes.files import (
    MANIFEST,
    CheckpointError,
    as_json,
    read_folder,
    remove_folder,
    tidy_folder,
    write_folder,
)
from slimbayes.untrusted import check_tensors, parse_json

KEEP = 2  # the latest, and one before it should that be damaged
_TENSORS, _STATE = "tensors.safetensors", "state.json"


def state_of(
    network: nn.Module, optimizer: torch.optim.Optimizer, extra: dict[str, Tensor]
) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name; of a sharded network every process calls it."""
    tensors = {f"network/{n}": t for n, t in network.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer/{index}/{n}": t
            for n, t in values.items()
            if isinstance(t, Tensor)
        }
    tensors |= {f"extra/{n}": t for n, t in extra.items()}
    return {
        n: t.full_tensor() if hasattr(t, "full_tensor") else t
        for n, t in tensors.items()
    }


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Write the checkpoint of a step and remove all but the latest few."""
    data = dump_tensors(
        {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
    )
    files = {_TENSORS: data, _STATE: as_json({"step": step, **facts})}
    try:
        write_folder(folder / f"step-{step:08d}", files)
    except (
        CheckpointError
    ) as error:  # its manifest is damaged, or the user's files are there
        warnings.warn(f"A checkpoint is not written: {error}", stacklevel=2)
    kept = _latest_first(folder)[:KEEP]
    for old in folder.glob("step-*[0-9]"):
        if old not in kept:
            with suppress(CheckpointError, OSError):  # what else is in it stays
                remove_folder(old)


def tidy_checkpoints(folder: Path) -> None:
    """Remove what killed processes left: drafts, and checkpoints that were only begun."""
    for path in folder.glob("step-*[0-9]"):
        with suppress(CheckpointError, OSError):  # what else is in it stays
            if (path / MANIFEST).exists():
                tidy_folder(path)
            else:
                remove_folder(path)


def latest_checkpoint(
    folder: Path,
    facts: Mapping[str, str] | None = None,
    network: nn.Module | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and facts of the latest good checkpoint; one that is damaged or another run's is named and skipped.

    Args:
        facts: what a run's own checkpoints say, such as the config's hash; a fact that one does not state is let pass.
        network: what its tensors must fit, by name, shape and type.
    """
    for path in _latest_first(folder):
        try:
            tensors, found = _read(path)
            if stranger := _why_foreign(tensors, found, facts or {}, network):
                warnings.warn(
                    f"Skipping a checkpoint of another run: {path} {stranger}.",
                    stacklevel=2,
                )
                continue
            return tensors, found
        except (CheckpointError, SafetensorError, ValueError) as error:
            warnings.warn(f"Skipping a damaged checkpoint: {error}", stacklevel=2)
    return None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    files = read_folder(path, {_TENSORS, _STATE})
    facts = parse_json(files[_STATE])
    if not isinstance(facts, dict) or not {"step", "curve", "hash"} <= facts.keys():
        raise CheckpointError(
            f"{path / _STATE} lacks the step, the curve or the config's hash."
        )
    check_tensors(files[_TENSORS])
    return load_tensors(files[_TENSORS]), facts


def _why_foreign(
    tensors: dict[str, Tensor],
    found: dict[str, Any],
    facts: Mapping[str, str],
    network: nn.Module | None,
) -> str:
    """What tells a checkpoint from those of a run; nothing if it is one of them."""
    for name, value in facts.items():
        if found.get(name, value) != value:
            return (
                f"has the {name} {str(found[name])[:16]!r}, and this run {value[:16]!r}"
            )
    if network is None:
        return ""
    own = {
        n.removeprefix("network/"): (tuple(t.shape), t.dtype)
        for n, t in tensors.items()
        if n.startswith("network/")
    }
    here = {n: (tuple(t.shape), t.dtype) for n, t in network.state_dict().items()}
    odd = sorted(n for n in own.keys() | here.keys() if own.get(n) != here.get(n))
    return f"is of another network: {', '.join(odd[:5])} differ" if odd else ""


def restore(
    tensors: dict[str, Tensor], network: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Put a checkpoint's tensors into a network and its optimizer; returns the extra ones."""
    own = {
        n.removeprefix("network/"): t
        for n, t in tensors.items()
        if n.startswith("network/")
    }
    here = network.state_dict()
    # In one order for all processes: safetensors has none, and sharding a tensor is work they do together.
    network.load_state_dict({n: sharded_like(own[n], t) for n, t in here.items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name in sorted(n for n in tensors if n.startswith("optimizer/")):
        _, index, field = name.split("/")
        tensor, like = tensors[name], parameters[int(index)]
        state.setdefault(int(index), {})[field] = (
            _laid_out_like(tensor, like) if tensor.shape == like.shape else tensor
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the very tensor, where a graph reads it
    return {
        n.removeprefix("extra/"): t
        for n, t in tensors.items()
        if n.startswith("extra/")
    }


def sharded_like(tensor: Tensor, here: Tensor) -> Tensor:
    """A whole tensor, sharded as another one is."""
    if not hasattr(here, "device_mesh"):
        return tensor
    from torch.distributed.tensor import (
        DTensor,
        distribute_tensor,
    )  # takes a quarter of the lab's start

    assert isinstance(here, DTensor)
    return distribute_tensor(tensor.to(here.device), here.device_mesh, here.placements)


def _laid_out_like(tensor: Tensor, here: Tensor) -> Tensor:
    """A whole tensor, sharded and in memory as another one is: fused optimizers refuse channels in another order."""
    if hasattr(here, "device_mesh"):
        return sharded_like(tensor, here)
    return torch.empty_like(here, dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def _latest_first(folder: Path) -> list[Path]:
    """The checkpoints; a folder without a manifest is one that a killed process had only begun."""
    begun = folder.glob("step-*[0-9]")
    whole = [path for path in begun if (path / MANIFEST).exists()]
    return sorted(whole, key=lambda path: path.name, reverse=True)
