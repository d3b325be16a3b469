"""save and load: the posterior alone, beside an untouched base checkpoint. safetensors and JSON, never pickle.

A checkpoint is a directory:

    posterior.safetensors   every parameter with ".posterior." in its name, and the state of modules that train beside
                            a frozen model; in half precision where that holds a tensor exactly
    config.json             which layers are converted with which config, and the base model's fingerprint
    base.safetensors        the network's own parameters and buffers, if asked for
    manifest.json           format version and the sha256 of each other file

`save` replaces a checkpoint at once: a process that is killed meanwhile leaves the former one or the new one, and
`load` finds whichever it is. A directory that holds anything else than a checkpoint is refused. files.py says how.
"""

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn

from slimbayes.convert.bayesianize import (
    Model,
    bayesianize,
    conversions_of,
    debayesianize,
)
from slimbayes.convert.plan import Selection
from slimbayes.convert.remarks import report_unsaved
from slimbayes.convert.summary import estimate_cost
from slimbayes.convert.trainable import freeze, is_saved_name
from slimbayes.engine.locate import unwrapped
from slimbayes.errors import SlimbayesWarning, cut
from slimbayes.files import (
    FORMAT,
    CheckpointError,
    as_json,
    read_folder,
    write_folder,
)
from slimbayes.layers.base import Converted
from slimbayes.posteriors import config_from_dict
from slimbayes.posteriors.configs.base import Config
from slimbayes.train.elbo import check_finite
from slimbayes.untrusted import check_form, check_tensors, parse_json

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FORM: Any = {  # of config.json
    "conversions": [
        {
            "module": str,
            "batch_dim": (int, type(None)),
            "saved": [str],
            "heads": [str],
            "frozen": bool,
            "groups": [{"config": {str: object}, "layers": [str]}],
        }
    ],
    "base": {"shapes": {str: [int]}, "sha256": str},
}


def save(model: nn.Module, path: str | os.PathLike[str], base: bool = False) -> Path:
    """Write a converted model's posterior to a directory, at once for whoever reads it.

    Args:
        model: a converted model, or one inside DistributedDataParallel or torch.compile. Of a model sharded by FSDP2
            every rank must call save; rank 0 writes.
        path: the directory, which is made. If it is there, it must be empty or hold a checkpoint and nothing else. A
            link to such a directory stays one.
        base: also write the network's own weights, for models that were trained together with their posterior.

    Raises:
        CheckpointError: the directory holds files that `save` did not write, or the path is none of a directory.
        OSError: a file cannot be written. `load` finds the former checkpoint, or the new one if it was complete.

    Example:
        >>> import slimbayes as sb, tempfile
        >>> net = sb.bayesianize(nn.Linear(4, 3), sb.Rank1())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(p.name for p in save(net, f"{folder}/posterior").iterdir())
        ['config.json', 'manifest.json', 'posterior.safetensors']
    """
    model = unwrapped(model)  # names would get a prefix
    check_finite(model)
    sharded = any(hasattr(t, "full_tensor") for t in _state(model).values())
    posterior, own = _split(model)
    if sharded and dist.get_rank() != 0:
        dist.barrier()  # rank 0 writes; nobody goes on before the checkpoint is there
        return Path(path)
    config = {
        "library": "slimbayes",
        "format": FORMAT,
        "conversions": _conversions(model),
        "base": _fingerprint(own),
    }
    files = {
        "posterior.safetensors": dump_tensors(posterior),
        "config.json": as_json(config),
    }
    if base:
        files["base.safetensors"] = dump_tensors(_untied(own))
    report_unsaved(model, base)
    try:
        return write_folder(Path(path), files)
    finally:
        if sharded:
            dist.barrier()


def load(
    model: Model,
    path: str | os.PathLike[str],
    check_base: Literal["weights", "structure"] = "weights",
) -> Model:
    """Convert a plain base model as a checkpoint says and fill in its posterior; returns the same model.

    Args:
        model: the base model, not converted, with the weights it had at `save` (unless the checkpoint holds them).
        path: a directory that `save` wrote.
        check_base: "weights" demands the very same base weights; "structure" only the same names and shapes, for a base
            that was fine-tuned or cast to another dtype since.

    Raises:
        CheckpointError: a file is missing, damaged or of an unknown version, or the model does not fit. The model is
            unchanged.

    Example:
        >>> import slimbayes as sb, copy, tempfile
        >>> plain = nn.Linear(4, 3)
        >>> net = sb.bayesianize(copy.deepcopy(plain), sb.Rank1())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load(plain, save(net, f"{folder}/posterior"))
        >>> torch.equal(again.posterior["weight"].r.loc, net.posterior["weight"].r.loc)
        True
    """
    inner = unwrapped(model)
    if inner is not model:
        load(inner, path, check_base)
        return model
    folder = Path(path)
    files = read_folder(folder, {"config.json", "posterior.safetensors"})
    config = read_config(files["config.json"], folder / "config.json")
    if any("_slimbayes" in m.__dict__ for m in model.modules()):
        raise CheckpointError(
            "load needs the plain base model, but this one is converted already. Call debayesianize first."
        )
    inside = is_saved_name(
        model,
        [
            f"{c['module']}.{name}".strip(".")
            for c in config["conversions"]
            for name in c["saved"]
        ],
    )
    own = {name: tensor for name, tensor in _state(model).items() if not inside(name)}
    weights = "base.safetensors" in files
    _check_base(config["base"], own, "structure" if weights else check_base)
    posterior = _tensors(
        files["posterior.safetensors"], folder / "posterior.safetensors"
    )
    base = (
        _tensors(files["base.safetensors"], folder / "base.safetensors")
        if weights
        else {}
    )
    if weights:  # of tied ones one will do
        filled = {own[name].data_ptr() for name in base.keys() & own.keys()}
        needed = {
            n: t for n, t in own.items() if n in base or t.data_ptr() not in filled
        }
        _check_same(
            base, _shapes(needed), f"{folder / 'base.safetensors'} does not fit"
        )
        _check_types(base, needed, f"{folder / 'base.safetensors'} does not fit")
    _convert(model, config["conversions"], posterior, folder)
    model.load_state_dict(posterior | base, strict=False)
    return model


def read_config(data: bytes, file: Path) -> dict[str, Any]:
    """The fields of a config.json, which anybody may have written: each has its form checked before it is used."""
    try:
        config: dict[str, Any] = parse_json(data)
        check_form(config, _FORM)
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {cut(str(error))}.") from error
    return config


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors in a model's state, where modules may also keep what is none (`get_extra_state`)."""
    return {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def _saved(model: nn.Module) -> list[str]:
    """Names of the modules whose own state is saved with the posteriors."""
    return [
        f"{root}.{name}".strip(".")
        for root, c in conversions_of(model)
        for name in c.saved
    ]


def _split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State of the posteriors and of everything else."""
    state = {
        n: t.full_tensor() if hasattr(t, "full_tensor") else t
        for n, t in _state(model).items()
    }
    # Members of an ensemble may have tied weights, which safetensors wants apart.
    inside = is_saved_name(model, _saved(model))
    posterior = {n: t.detach().cpu() for n, t in state.items() if inside(n)}
    for (
        name,
        tensor,
    ) in (
        posterior.items()
    ):  # in half precision, where it holds all numbers: loading widens them again
        short = tensor.half() if tensor.dtype == torch.float32 else tensor
        kept = short if torch.equal(short.to(tensor.dtype), tensor) else tensor
        posterior[name] = kept.clone(memory_format=torch.contiguous_format)
    return posterior, {n: t for n, t in state.items() if not inside(n)}


def _untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory once each: safetensors refuses aliases, and loading one fills them all."""
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in state.items():
        seen.setdefault(
            (tensor.data_ptr() if tensor.numel() else hash(name), tuple(tensor.shape)),
            name,
        )
    return {name: state[name].detach().cpu().contiguous() for name in seen.values()}


def _conversions(model: nn.Module) -> list[dict[str, Any]]:
    """For each converted module: its name, batch_dim, and its layers grouped by config."""
    out = []
    for name, conversion in conversions_of(model):
        groups: dict[str, dict[str, Any]] = {}
        root = model.get_submodule(name)
        for d in conversion.decisions:
            if d.config is not None and isinstance(
                dict(root.named_modules()).get(d.name), Converted
            ):
                group = groups.setdefault(
                    json.dumps(d.config.to_dict()),
                    {"config": d.config.to_dict(), "layers": []},
                )
                group["layers"].append(d.name)
        record = {
            "module": name,
            "batch_dim": conversion.batch_dim,
            "saved": conversion.saved,
            "heads": conversion.heads,
            "frozen": bool(conversion.frozen),
            "groups": list(groups.values()),
        }
        out.append(record)
    return out


def _convert(
    model: nn.Module,
    conversions: list[dict[str, Any]],
    posterior: dict[str, Tensor],
    folder: Path,
) -> None:
    """Convert each module as recorded; on any misfit put the model back and say what it was."""
    room = sum(
        t.numel() for t in posterior.values()
    )  # numbers in the file that no conversion so far has asked for
    try:
        for record in conversions:
            module = model.get_submodule(record["module"])
            for group in record["groups"] or [
                {"config": {"kind": "Deterministic"}, "layers": []}
            ]:
                config = config_from_dict(group["config"])
                wanted = set(group["layers"])
                include = (
                    (lambda name, layer, wanted=wanted: name in wanted)
                    if wanted
                    else None
                )
                room = _room_after(room, module, config, include, folder)
                with warnings.catch_warnings(
                    action="ignore", category=SlimbayesWarning
                ):  # starts do not matter
                    bayesianize(
                        module, config, include=include, batch_dim=record["batch_dim"]
                    )
            conversion = module.__dict__["_slimbayes"]
            conversion.saved = record["saved"]
            conversion.heads = record["heads"]
            conversion.frozen = (
                freeze(module, conversion.heads) if record["frozen"] else []
            )
        inside = is_saved_name(model, _saved(model))
        needed = {
            name: tensor for name, tensor in _state(model).items() if inside(name)
        }
        problem = f"{folder / 'posterior.safetensors'} does not fit"
        _check_same(posterior, _shapes(needed), problem)
        _check_types(posterior, needed, problem)
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        debayesianize(model)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder}: the checkpoint does not fit this model. {cut(str(error))}"
        ) from error


def _room_after(
    room: int, module: nn.Module, config: Config, include: Selection, folder: Path
) -> int:
    """Numbers left in the file beside those a conversion needs; too few are refused before any is allocated."""
    copies = (
        max(config.members, getattr(config, "components", 1)) - 1
    )  # each has one number at least
    needed = (
        estimate_cost(module, config, include).extra_parameters
        if copies <= room
        else copies
    )
    if needed > room:
        raise CheckpointError(
            f"{folder / 'config.json'} asks for {type(config).__name__} with {needed:,} numbers or more, "
            f"of which posterior.safetensors holds {room:,}."
        )
    return room - needed


def _shapes(state: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in sorted(state.items())}


def _check_same(
    here: dict[str, Tensor], wanted: dict[str, list[int]], problem: str
) -> None:
    """Refuse tensors of other names or shapes than are wanted."""
    shapes = _shapes(here)
    faults = [f"it lacks {n}" for n in sorted(wanted.keys() - shapes.keys())]
    faults += [
        f"it has {n}, which is not wanted"
        for n in sorted(shapes.keys() - wanted.keys())
    ]
    both = sorted(shapes.keys() & wanted.keys())
    faults += [
        f"{n} is {shapes[n]} but {wanted[n]} is wanted"
        for n in both
        if shapes[n] != wanted[n]
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"{problem}: {'; '.join(map(cut, faults[:5]))}{more}.")


def _check_types(
    here: dict[str, Tensor], wanted: dict[str, Tensor], problem: str
) -> None:
    """Refuse tensors of another kind than is wanted: whole numbers are no weights. Real ones may have any precision."""
    for name, tensor in wanted.items():
        got, needed = here[name].dtype, tensor.dtype
        real = needed in _REAL and got in _REAL
        if got != needed and not real:
            raise CheckpointError(
                f"{problem}: {cut(name)} is {got} but {needed} is wanted."
            )


def _fingerprint(state: dict[str, Tensor]) -> dict[str, Any]:
    """Names, shapes and content of the base model: no posterior is to be laid over another network."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(
            state[name]
            .detach()
            .cpu()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    return {"shapes": _shapes(state), "sha256": digest.hexdigest()}


def _check_base(recorded: dict[str, Any], state: dict[str, Tensor], check: str) -> None:
    if check not in ("weights", "structure"):
        raise ValueError(f"check_base must be 'weights' or 'structure', got {check!r}.")
    problem = "The base model is not the one this posterior was made for"
    _check_same(state, recorded["shapes"], problem)
    if check == "weights" and _fingerprint(state)["sha256"] != recorded["sha256"]:
        raise CheckpointError(
            "The base model has the right shapes but other weights than the one this posterior was saved with. Load "
            "its weights first, or save with base=True, or pass check_base='structure' if the difference is meant "
            "(fine-tuned or cast since)."
        )


def _tensors(data: bytes, file: Path) -> dict[str, Tensor]:
    try:
        check_tensors(data)
        return load_tensors(data)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a valid safetensors file: {cut(str(error))}."
        ) from error
