"""export: a converted model as one file that runs without slimbayes, in torch.export's format or as ONNX.

The graph is that of `predict`: S draws of every layer's posterior, folded into one batch where that was proven right,
then averages and uncertainties if a likelihood is named. What is random enters as standard normals, which are either
written into the file (the same S functions at every call) or an input of the graph.

Sizes: S draws, K members, B rows, W normals of one draw.
"""

import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.engine import calls, noise
from slimbayes.engine.layout import Layout
from slimbayes.engine.locate import batch_dim_of, layout_of
from slimbayes.engine.noise import Seed
from slimbayes.engine.passes import Noise, Pass
from slimbayes.engine.sharing import evaluating
from slimbayes.errors import cut
from slimbayes.files import replacing
from slimbayes.prediction.checks import (
    check_draws,
    check_inputs,
    check_scores,
)
from slimbayes.prediction.draws import member_weights
from slimbayes.prediction.predict import find_output
from slimbayes.prediction.prediction import Prediction
from slimbayes.prediction.sample import converted_posteriors
from slimbayes.prediction.sample import members as members_of
from slimbayes.train.elbo import check_finite
from slimbayes.train.likelihoods import LikelihoodName, likelihood_named

SUMMARIES = ("mean", "aleatoric", "epistemic")


class ExportError(ValueError):
    """torch found no graph of a model, or a format has no words for it."""


class Exported(NamedTuple):
    """What a file holds: names and shapes of its inputs and outputs, None for the number of rows, and its draws."""

    path: Path
    inputs: dict[str, list[int | None]]
    outputs: tuple[str, ...]
    draws: int
    likelihood: str | None


def export(
    model: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    path: str | Path,
    draws: int | None = None,
    members: Sequence[int] | None = None,
    noise: Literal["fixed", "input"] = "fixed",
    likelihood: LikelihoodName | None = None,
    likelihood_std: float | Tensor = 0.0,
    class_dim: int | None = None,
    seed: Seed = 0,
    notes: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a converted model to a .onnx or .pt2 file that takes any number of rows and needs no slimbayes.

    Args:
        model: a converted model; it is run in eval mode and stays as it is.
        example: what the model takes, a tensor or several, of two rows at least.
        path: ends in .onnx (onnx and onnxscript are needed: the `export` extra) or .pt2. Open a .pt2 only if you know
            who wrote it: torch may unpickle parts of it.
        draws: S, the number of draws; by default K, one from each member.
        members: numbers of the members to keep; by default all. Draws of others are left out. Each draw is then a part
            of the graph of its own.
        noise: "fixed" writes the draws of `seed` into the file, so that it computes what `predict(model, x, draws,
            seed=seed)` does; with "input" the graph takes their standard normals (S, W) as a last input.
        likelihood: what outputs mean, as in `predict`: the graph then gives mean (class probabilities), aleatoric and
            epistemic uncertainty (B, ...). Without, it gives every draw's outputs (S, B, ...).
        likelihood_std, class_dim: as in `predict`.
        notes: what else the file shall say of itself, as JSON holds it.

    Example:
        >>> import slimbayes as sb, tempfile
        >>> net, x = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(members=2)), torch.randn(5, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = export(net, x, f"{folder}/net.pt2", draws=8, likelihood="categorical")
        ...     mean, aleatoric, epistemic = torch.export.load(made.path).module()(x)
        >>> bool(torch.allclose(mean, sb.predict(net, x, draws=8, seed=0).probs, atol=1e-6))
        True
    """
    path, args = Path(path), example if isinstance(example, tuple) else (example,)
    if path.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"export writes .onnx and .pt2 files, got {str(path)!r}.")
    check_draws("export", draws)
    if noise not in ("fixed", "input"):
        raise ValueError(f"noise must be 'fixed' or 'input', got {noise!r}.")
    dim = batch_dim_of(model) or 0
    if (
        not args
        or not all(isinstance(x, Tensor) and x.dim() for x in args)
        or _rows(args[0], dim) < 2
    ):
        raise ValueError(
            "export needs an example of two rows at least: a tensor, or a tuple of those the model takes."
        )
    check_finite(model)
    check_inputs(model, (args, {}), 0)
    if likelihood is not None:
        likelihood_named(likelihood)  # refuses an unknown one
    with evaluating(model), torch.no_grad():
        graph = Graph(
            model,
            args,
            draws,
            members,
            seed,
            likelihood,
            likelihood_std,
            class_dim,
            fixed=noise == "fixed",
        )
        inputs = (
            args
            if graph.noise is not None
            else (*args, torch.zeros(graph.total, sum(graph.widths)))
        )
        if likelihood is not None:  # no values are seen while a graph is traced
            given = graph.outputs(
                graph.noise if graph.noise is not None else inputs[-1], args
            )
            check_scores(model, given, likelihood, class_dim)
        names = ["input"] if len(args) == 1 else [f"input{i}" for i in range(len(args))]
        names += ["noise"] * (len(inputs) - len(args))
        sizes: dict[str, list[int | None]] = {
            name: list(x.shape) for name, x in zip(names, inputs)
        }
        for name, x in zip(names, args):
            if _rows(x, dim) == _rows(args[0], dim):
                sizes[name][dim] = None
        made = Exported(
            path,
            sizes,
            ("draws",) if likelihood is None else SUMMARIES,
            len(graph.kept),
            likelihood,
        )
        try:
            _write(graph, inputs, made, notes or {})
        except ExportError:
            if not graph.folded:
                raise
            graph.folded = False  # what a format has no word for in many draws at once, it may have in one at a time
            _write(graph, inputs, made, notes or {})
    return made


class Graph(nn.Module):
    """A model under S draws that follow from standard normals, as one function of tensors."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Tensor, ...],
        draws: int | None,
        members: Sequence[int] | None,
        seed: Seed,
        likelihood: LikelihoodName | None,
        likelihood_std: float | Tensor,
        class_dim: int | None,
        fixed: bool,
    ) -> None:
        super().__init__()
        self.model, self.likelihood, self.likelihood_std, self.class_dim = (
            model,
            likelihood,
            likelihood_std,
            class_dim,
        )
        self.posteriors, self.members = converted_posteriors(model), members_of(model)
        self.total = self.members if draws is None else int(draws)
        self.kept = _kept(members, self.members, self.total)
        weights = member_weights(model)
        chosen = sorted({j % self.members for j in self.kept})
        self.count = len(chosen)
        self.weights = (
            None
            if weights is None
            else (weights[chosen] / weights[chosen].sum()).tolist()
        )
        held = noise.draw_numbered(
            self.posteriors, Pass(self.total, 1, rowwise=False), noise.seed_of(seed)
        )
        if held.keys and not fixed:
            raise ValueError(
                "noise='input' feeds normals to posteriors, but dropout draws masks while its layer runs: "
                "use noise='fixed'."
            )
        self.widths = [held.noise[p.key].block.shape[1] for p in self.posteriors]
        self.noise: Tensor | None
        blocks = [held.noise[p.key].block.float() for p in self.posteriors] or [
            torch.zeros(self.total, 0)
        ]
        self.register_buffer("noise", torch.cat(blocks, 1) if fixed else None)
        for key, numbers in held.keys.items():
            self.register_buffer(f"keys_{key}", numbers)
        self.layout = (
            layout_of(model, args, {}, self.posteriors) if self.posteriors else Layout()
        )
        self.folded = self.layout.folds and len(self.kept) == self.total > 1

    def forward(self, *inputs: Tensor) -> Any:
        given, args = (
            (inputs[-1], inputs[:-1]) if self.noise is None else (self.noise, inputs)
        )
        outputs = self.outputs(given, args)
        if self.likelihood is None:
            return outputs
        meaning = (
            self.likelihood,
            self.count,
            self.likelihood_std,
            self.class_dim,
            self.weights,
        )
        found = Prediction.from_outputs(outputs, *meaning)
        return tuple(getattr(found, name) for name in SUMMARIES)

    def outputs(self, given: Tensor, args: tuple[Tensor, ...]) -> Tensor:
        """Outputs (S, B, ...) of the draws that these normals make."""
        if not self.posteriors:
            return find_output(self.model(*args)).unsqueeze(0)
        held = Pass(self.total, 1, rowwise=False)
        for posterior, block in zip(self.posteriors, given.split(self.widths, 1)):
            held.put(
                posterior.key, Noise(block.to(posterior.dtype), block.new_empty(0, 0))
            )
            if posterior.late:
                held.keys[posterior.key] = getattr(self, f"keys_{posterior.key}")
        known = self.layout if self.layout.folds else None
        new = held.view(self.total * self.layout.rows((args, {})), known)
        if self.folded:
            return find_output(
                calls.run_draws(
                    self.model, self.posteriors, args, {}, new, self.layout, folds=True
                )
            )
        parts = [
            calls.run_pass(new.single(j, known), self.posteriors, self.model, args, {})
            for j in self.kept
        ]
        return torch.stack([find_output(part) for part in parts])


def _rows(x: Tensor, dim: int) -> int:
    """How many rows an input has along the dimension of rows, which it may lack."""
    return x.shape[dim] if x.dim() > dim else 0


def _kept(members: Sequence[int] | None, count: int, total: int) -> list[int]:
    """Numbers of the draws that belong to some of the members."""
    for member in members or ():
        if (
            isinstance(member, bool)
            or not isinstance(member, int)
            or not 0 <= member < count
        ):
            raise ValueError(
                f"members names {member!r}, but the model has members 0 to {count - 1}."
            )
    if members is not None and not members:
        raise ValueError("members is empty: at least one member must be kept.")
    kept = [j for j in range(total) if members is None or j % count in members]
    if not kept:
        raise ValueError(
            f"None of the {total} draws belongs to members {list(members or ())}: draw j belongs to member j mod "
            f"{count}."
        )
    return kept


def _write(
    graph: Graph, inputs: tuple[Tensor, ...], made: Exported, notes: Mapping[str, Any]
) -> None:
    """The file, whole or not there, with a word on what it holds."""
    about = json.dumps({**notes, "format": 1, **made._asdict(), "path": made.path.name})
    shapes = tuple(
        {
            dim: torch.export.Dim.DYNAMIC
            for dim, size in enumerate(sizes)
            if size is None
        }
        or None
        for sizes in made.inputs.values()
    )
    with _explain_failure(made.path.name):
        program = torch.export.export(
            graph, inputs, dynamic_shapes=(shapes,), strict=False
        )
    with replacing(made.path) as draft:
        if made.path.suffix == ".pt2":
            with open(draft, "wb") as file:
                torch.export.save(program, file, extra_files={"slimbayes.json": about})
            return
        if find_spec("onnxscript") is None:
            raise ImportError(
                'A .onnx file needs onnx and onnxscript: pip install "slimbayes[export]"'
            )
        with _explain_failure(made.path.name, " A .pt2 file can hold it."):
            names = {
                "input_names": list(made.inputs),
                "output_names": list(made.outputs),
            }
            onnx = torch.onnx.export(program, **names)
        assert onnx is not None
        # Values inside get other names than outputs have: torch names them after operations, as mean.
        ends = {id(value) for value in onnx.model.graph.outputs}
        for value in (value for node in onnx.model.graph for value in node.outputs):
            if value.name in made.outputs and id(value) not in ends:
                value.name = f"{value.name}_inside"
        onnx.model.metadata_props["slimbayes"] = about
        onnx.save(draft, external_data=False)


@contextmanager
def _explain_failure(file: str, remedy: str = "") -> Iterator[None]:
    """What torch cannot put into a graph, in words. Its own report, of pages, is the cause of the error; it is not
    printed."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    except (
        Exception
    ) as error:  # of torch's export there are many kinds, most of them private
        first = next(
            (line for line in str(error).splitlines() if line.strip()),
            type(error).__name__,
        )
        raise ExportError(
            f"torch cannot write this model as a graph for {file}: {cut(first, 200)} What its forward decides by "
            f"values or by the number of rows (if x.sum() > 0, x.item(), len(x)) has no graph.{remedy}"
        ) from error
    finally:
        log.setLevel(level)
