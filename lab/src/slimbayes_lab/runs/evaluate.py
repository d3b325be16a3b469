"""What a trained network is judged on: test rows, corrupted, shifted and unfamiliar ones.

Corruptions are functions of their name, severity and rows. Published ones (CIFAR-10-C, ImageNet-C) come first; images
in memory that have none are corrupted here, pictures in folders are not.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from slimbayes.prediction.prediction import Prediction
from slimbayes.seeds import generator, key
from slimbayes_lab.configs.experiment import Evaluate
from slimbayes_lab.data import Split, corrupt, load
from slimbayes_lab.data.catalog import find
from slimbayes_lab.data.folders import ImageFolder, read_square
from slimbayes_lab.execution import Execution
from slimbayes_lab.report.record import Evaluation, Example
from slimbayes_lab.runs.predictor import Predictor
from slimbayes_lab.runs.scores import ood_scores
from slimbayes_lab.runs.watchers import Watcher
from slimbayes_lab.tasks.rows import Rows, check_split, limited
from slimbayes_lab.tasks.task import Task

_ENTROPY = 3  # column of `_row_facts`
UNFAMILIAR = ("inverted", "shuffled")  # test images that are none any more
_PUBLISHED = (
    "cifar10",
    "cifar100",
    "imagenet",
)  # of which there is a set of this name with -c
_CHUNK = 1000  # images that are corrupted together: their random numbers depend on it


def evaluate(
    predictor: Predictor,
    execution: Execution,
    watcher: Watcher = Watcher(),  # noqa: B008 (it keeps nothing)
) -> tuple[list[Evaluation], list[Example]]:
    """All evaluations that a config asks for, and the rows it is most and least sure of."""
    task, chosen, workers = (
        predictor.task,
        predictor.experiment.evaluate,
        execution.workers,
    )
    check_sets(chosen, task, execution)
    draws = predictor.asked_draws()
    noted: dict[int, list[Tensor]] = {}

    def note(count: int, prediction: Prediction, y: Tensor) -> None:
        if predictor.discrete:
            noted.setdefault(count, []).append(_row_facts(prediction, y))

    made = predictor.score(
        task.test, draws, task.name, "test", workers=workers, note=note
    )
    familiar = {count: torch.cat(parts) for count, parts in noted.items()}
    if task.validation is not None:
        rows = task.in_own_units(task.validation)
        made += predictor.score(rows, draws, task.name, "validation", workers=workers)
    made += corruption_scores(predictor, draws, execution, watcher)
    for name in chosen.shift:
        shifted = limited(open_matching(name, task, execution), chosen.limit)
        made += predictor.score(shifted.to(predictor.device), draws, name, "shift")
    for name in chosen.ood:
        strange = open_unfamiliar(name, chosen.limit, task, execution).to(
            predictor.device
        )
        predictions = predictor.predictions(strange, f"ood {name}", draws)
        entropies = [
            {n: p.entropy.double() for n, p in found.items()}
            for found, _ in predictions
        ]
        for n in draws:
            scores = ood_scores(
                familiar[n][:, _ENTROPY],
                torch.cat([entropy[n] for entropy in entropies]),
            )
            made.append(
                Evaluation(
                    data=name, role="ood", draws=n, rows=len(strange), metrics=scores
                )
            )
    return made, _examples(
        task, familiar[draws[-1]], chosen.examples
    ) if familiar else []


def _row_facts(prediction: Prediction, y: Tensor) -> Tensor:
    """Target, predicted class, its probability, entropy and epistemic part of it, of each row: (N, 5)."""
    p, target = prediction, y.argmax(-1) if y.is_floating_point() else y
    return torch.stack(
        [
            column.double()
            for column in (target, p.label, p.confidence, p.entropy, p.epistemic)
        ],
        1,
    )


# --- sets of rows beside the test rows ---


def check_sets(chosen: Evaluate, task: Task, execution: Execution) -> None:
    """Refuse sets that are not there or do not fit, before anything is trained."""
    if chosen.ood and task.real:
        raise ValueError(
            f"evaluate.ood asks for {chosen.ood[0]}, but {task.name} has real targets: it is for classes."
        )
    for name in (*chosen.shift, *chosen.ood):
        if name not in UNFAMILIAR:
            open_matching(name, task, execution)
    in_memory = task.images and isinstance(task.test, Split)
    if chosen.corruption_names and not in_memory:
        _check_folders(chosen, task, execution)
    if set(chosen.ood) & set(UNFAMILIAR) and not in_memory:
        names = " and ".join(UNFAMILIAR)
        raise ValueError(
            f"evaluate.ood: {names} are made of images in memory; {task.name} has none."
        )


def _check_folders(chosen: Evaluate, task: Task, execution: Execution) -> None:
    """Refuse corruptions of pictures that are not published, not here, or of other classes."""
    if not task.images or task.name not in _PUBLISHED:
        raise ValueError(
            f"evaluate.corruptions are for sets of images; {task.name} is none, or has none published."
        )
    found = find(f"{task.name}-c", execution.data_dir)
    wanted = [
        f"{name}/{severity}"
        for name in chosen.corruption_names
        for severity in chosen.severities
    ]
    if missing := [name for name in wanted if name not in found.splits]:
        raise ValueError(
            f"evaluate.corruptions asks for {missing[0]} and {len(missing) - 1} more that {task.name}-c has not here; "
            f"it has {len(found.splits)}. Complete it, or ask for fewer corruptions or severities."
        )
    if found.classes != task.classes:
        odd = sorted(set(found.classes) ^ set(task.classes))[:3]
        raise ValueError(
            f"{task.name}-c has {len(found.classes)} classes and {task.name} {len(task.classes)}, which "
            f"differ in {', '.join(odd)}: labels would not fit."
        )


def corruption_scores(
    predictor: Predictor, draws: Sequence[int], execution: Execution, watcher: Watcher
) -> list[Evaluation]:
    """Evaluations of test images under each corruption and severity that a config asks for: of the published ones where
    they are at hand, else of those made here.
    """
    experiment, _, task, _ = predictor
    chosen, said = experiment.evaluate, set()
    made: list[Evaluation] = []
    pairs = [
        (name, severity)
        for name in chosen.corruption_names
        for severity in chosen.severities
    ]
    if pairs:
        watcher.begin("corruptions", len(pairs))
    for done, (name, severity) in enumerate(pairs, 1):
        watcher.move(done)
        rows: Rows
        if published := _published(
            task.name, name, severity, execution, experiment.data.image_size
        ):
            source, rows = f"{task.name}-c", limited(published, chosen.limit)
        else:
            assert isinstance(
                task.test, Split
            )  # `check_sets` has seen that folders have them all
            try:
                source, rows = (
                    task.name,
                    _corrupt(
                        limited(task.test, chosen.limit), name, severity, execution
                    ),
                )
            except (ValueError, FileNotFoundError) as error:
                if name not in said:
                    watcher.say(f"{name} is left out: {error}")
                said.add(name)
                continue
        about = {"corruption": name, "severity": severity}
        made += predictor.score(
            rows.to(predictor.device),
            draws,
            source,
            "corruption",
            about,
            execution.workers,
        )
    return made


def _published(
    data: str, name: str, severity: int, execution: Execution, size: int
) -> Rows | None:
    if data not in _PUBLISHED:
        return None
    try:
        rows = load(f"{data}-c", execution.data_dir, [f"{name}/{severity}"]).splits[
            f"{name}/{severity}"
        ]
    except FileNotFoundError:
        return None
    except ValueError as error:
        if "has no split" in str(error):
            return None
        raise  # a damaged file is no reason to judge by other images
    if isinstance(
        rows, ImageFolder
    ):  # already the middle of the pictures, 224 pixels high and wide
        rows.read = partial(read_square, size=size)
    return rows


def _corrupt(test: Split, name: str, severity: int, execution: Execution) -> Split:
    folder = None if execution.data_dir is None else execution.data_dir / "frost"
    parts = []
    for index, images in enumerate(test.x.split(_CHUNK)):
        source = torch.Generator(images.device).manual_seed(
            key(0, "corrupt", name, severity, index)
        )
        parts.append(
            (
                corrupt(
                    images.float() / 255, name, severity, source, frost_folder=folder
                )
                * 255
            )
            .round()
            .byte()
        )
    return Split(torch.cat(parts), test.y)


def open_matching(name: str, task: Task, execution: Execution) -> Split:
    """Test rows of another set, of the same shape as the task's."""
    rows = load(name, execution.data_dir, ["test"]).splits["test"]
    if not isinstance(rows, Split):
        raise ValueError(
            f"{name} is decoded image by image; only sets in memory can be asked for here."
        )
    if isinstance(task.test, Split) and rows.x.shape[1:] != task.test.x.shape[1:]:
        shape, needed = tuple(rows.x.shape[1:]), tuple(task.test.x.shape[1:])
        raise ValueError(
            f"{name} has inputs of shape {shape}, but {task.name} has {needed}."
        )
    check_split(rows, f"{name}, test")
    return rows


def open_unfamiliar(
    name: str, limit: int | None, task: Task, execution: Execution
) -> Split:
    """Rows of a set the network never saw, or test images with their colours inverted or their pixels shuffled."""
    if name not in UNFAMILIAR:
        return limited(open_matching(name, task, execution), limit)
    assert isinstance(task.test, Split)
    rows = limited(task.test, limit)
    if name == "inverted":
        return Split(255 - rows.x, rows.y)
    flat = rows.x.flatten(2)
    order = torch.rand(
        len(flat), 1, flat.shape[2], generator=generator(0, "shuffled")
    ).argsort(2)
    return Split(
        flat.gather(2, order.expand_as(flat).to(flat.device)).view_as(rows.x), rows.y
    )


# --- rows to show ---


def _examples(task: Task, notes: Tensor, wanted: int) -> list[Example]:
    """Test rows the network is most and least sure of, by the entropy of its prediction."""
    names, table = task.classes or ("0", "1"), notes.cpu()
    order = table[:, _ENTROPY].sort(stable=True).indices
    count = min(wanted, len(order) // 2)
    made = []
    sides: tuple[tuple[Literal["most", "least"], Tensor], ...] = (
        ("most", order),
        ("least", order.flip(0)),
    )
    for sure, index in (
        (sure, index) for sure, side in sides for index in side[:count].tolist()
    ):
        truth, label, confidence, entropy, epistemic = table[index].tolist()
        made.append(Example(
            index=index, sure=sure, label=names[int(truth)], predicted=names[int(label)], confidence=confidence,
            entropy=entropy, epistemic=epistemic, image=_picture(task.test, index),
        ))  # fmt: skip
    return made


def _picture(rows: Rows, index: int) -> str | None:
    """A row's image as a PNG data URL; None where rows are no images of bytes."""
    if (
        not isinstance(rows, Split)
        or rows.x.dtype != torch.uint8
        or rows.x.dim() != 4
        or rows.x.shape[1] not in (1, 3)
    ):
        return None
    from PIL import Image

    pixels = rows.x[index].permute(1, 2, 0).cpu().numpy()
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(
        out, "PNG", optimize=True
    )
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
