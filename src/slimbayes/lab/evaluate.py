"""What a trained network is judged on: test rows, corrupted ones, shifted ones and unfamiliar ones.

Corruptions are functions of their name, severity and the rows, the same for all runs.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.data import Split, corrupt, load
from slimbayes.lab.config import Evaluate
from slimbayes.lab.evaluation_scores import strangeness
from slimbayes.lab.execution import Execution, Nobody, Watcher, watched
from slimbayes.lab.judge import Judge
from slimbayes.lab.seeds import key
from slimbayes.lab.task import Rows, Task, limited
from slimbayes.report.record import Evaluation, Example

_CHUNK = 1000  # images that are corrupted together: their random numbers depend on it
STRANGERS = ("inverted", "shuffled")  # test images that are none any more


def evaluate(
    judge: Judge, execution: Execution, watcher: Watcher | None = None
) -> tuple[list[Evaluation], list[Example]]:
    """All evaluations that a config asks for, and the rows it is most and least sure of."""
    watcher, chosen, task = watcher or Nobody(), judge.chosen, judge.task
    check(chosen, task, execution)
    draws = sorted(set(chosen.draws)) if _random(judge.network) else [1]
    made, familiar = judge.judge(task.test, draws, task.name, "test")
    if task.validation is not None:
        made += judge.judge(_in_own_units(task, task.validation), draws, task.name, "validation")[0]
    for source, name, severity, rows in _corrupted(judge, execution, watcher):
        made += judge.judge(rows, draws, source, "corruption", corruption=name, severity=severity)[0]
    for name in chosen.shift:
        rows = _fitting(name, limited(_test_of(name, execution), chosen.limit), task)
        made += judge.judge(rows.to(judge.device), draws, name, "shift")[0]
    for name in chosen.ood:
        strange = judge.doubts(_strange(name, judge, execution), f"ood {name}", draws)
        made += [
            Evaluation(
                data=name, role="ood", draws=n, rows=len(strange[n]), metrics=strangeness(familiar[n], strange[n])
            )
            for n in draws
        ]
    return made, _examples(judge, draws) if chosen.examples and judge.likelihood != "gaussian" else []


def check(chosen: Evaluate, task: Task, execution: Execution) -> None:
    """Refuse sets that are not there or do not fit, before anything is trained."""
    if chosen.ood and task.real:
        raise ValueError(f"evaluate.ood asks for {chosen.ood[0]}, but {task.name} has real targets: it is for classes.")
    for name in (*chosen.shift, *chosen.ood):
        if name not in STRANGERS:
            _fitting(name, _test_of(name, execution), task)
    if chosen.corruption_names and not (task.images and isinstance(task.test, Split)):
        raise ValueError(f"evaluate.corruptions are for sets of images in memory; {task.name} is not one.")
    if set(chosen.ood) & set(STRANGERS) and not (task.images and isinstance(task.test, Split)):
        raise ValueError(f"evaluate.ood: {' and '.join(STRANGERS)} are made of images in memory; {task.name} has none.")


def _in_own_units(task: Task, rows: Split) -> Split:
    """Rows with targets as they came: training targets are standardised."""
    return rows if task.y_mean is None or task.y_std is None else Split(rows.x, task.y_mean + task.y_std * rows.y)


def _random(network: nn.Module) -> bool:
    from slimbayes.engine.passes import posteriors_of

    return bool(posteriors_of(network))


def _corrupted(judge: Judge, execution: Execution, watcher: Watcher) -> Iterator[tuple[str, str, int, Split]]:
    """Test images under each corruption and severity, and which they are: the published ones where they are at hand, else made here."""
    names = judge.chosen.corruption_names
    if not names:
        return
    assert isinstance(judge.task.test, Split)
    test = limited(judge.task.test, judge.chosen.limit)
    pairs = [(name, severity) for name in names for severity in judge.chosen.severities]
    for name, severity in watched(pairs, watcher, "corruptions", len(pairs)):
        published = _published(judge.task.name, name, severity, execution, judge.chosen.limit)
        rows = published or _corrupt(test, name, severity, execution, watcher, judge.chosen.severities[0])
        if rows is not None:
            yield f"{judge.task.name}-c" if published else judge.task.name, name, severity, rows.to(judge.device)


def _published(data: str, name: str, severity: int, execution: Execution, limit: int | None) -> Split | None:
    if data not in ("cifar10", "cifar100"):
        return None
    try:
        rows = load(f"{data}-c", execution.data_dir, [f"{name}/{severity}"]).splits[f"{name}/{severity}"]
    except FileNotFoundError:
        return None
    except ValueError as error:
        if "has no split" in str(error):
            return None
        raise  # a damaged file is no reason to judge by other images
    assert isinstance(rows, Split)
    return limited(rows, limit)


def _corrupt(
    test: Split, name: str, severity: int, execution: Execution, watcher: Watcher, told: int = 1
) -> Split | None:
    folder = None if execution.data_dir is None else execution.data_dir / "frost"
    parts = []
    for index, images in enumerate(test.x.split(_CHUNK)):
        source = torch.Generator(images.device).manual_seed(key(0, "corrupt", name, severity, index))
        try:
            made = corrupt(images.float() / 255, name, severity, source, frost_folder=folder)
        except (ValueError, FileNotFoundError) as error:
            if severity == told:
                watcher.say(f"{name} is left out: {error}")
            return None
        parts.append((made * 255).round().to(torch.uint8))
    return Split(torch.cat(parts), test.y)


def _test_of(name: str, execution: Execution) -> Split:
    found = load(name, execution.data_dir, ["test"]).splits["test"]
    if not isinstance(found, Split):
        raise ValueError(f"{name} is decoded image by image; only sets in memory can be asked for here.")
    return found


def _strange(name: str, judge: Judge, execution: Execution) -> Split:
    """Rows of a set the network never saw, or test images with their colours inverted or their pixels shuffled."""
    test = judge.task.test
    if name in STRANGERS:
        assert isinstance(test, Split)
        rows = limited(test, judge.chosen.limit)
        if name == "inverted":
            return Split(255 - rows.x, rows.y)
        flat = rows.x.flatten(2)
        source = torch.Generator("cpu").manual_seed(key(0, "shuffled"))
        order = torch.rand(len(flat), 1, flat.shape[2], generator=source).argsort(2).expand_as(flat).to(flat.device)
        return Split(flat.gather(2, order).view_as(rows.x), rows.y)
    return _fitting(name, limited(_test_of(name, execution), judge.chosen.limit), judge.task).to(judge.device)


def _fitting(name: str, rows: Split, task: Task) -> Split:
    if isinstance(task.test, Split) and rows.x.shape[1:] != task.test.x.shape[1:]:
        raise ValueError(
            f"{name} has inputs of shape {tuple(rows.x.shape[1:])}, but {task.name} has {tuple(task.test.x.shape[1:])}."
        )
    return rows


def _examples(judge: Judge, draws: list[int]) -> list[Example]:
    """Test rows the network is most and least sure of, by the entropy of its prediction."""
    facts: list[Tensor] = []
    for found, y in judge.predictions(judge.task.test, f"{judge.task.name} test {{}}", draws):
        p = found[draws[-1]]
        y = y.argmax(-1) if y.is_floating_point() else y
        facts.append(torch.stack([column.double() for column in (y, p.label, p.confidence, p.entropy, p.epistemic)], 1))
    table = torch.cat(facts).cpu()
    order = table[:, 3].sort(stable=True).indices
    count = min(judge.chosen.examples, len(order) // 2)
    picked = [("most", int(i)) for i in order[:count]] + [("least", int(i)) for i in order.flip(0)[:count]]
    return [_example(judge, sure, index, table[index].tolist()) for sure, index in picked]


def _example(judge: Judge, sure: Any, index: int, facts: list[float]) -> Example:
    names = judge.task.classes or ("0", "1")
    truth, label, confidence, entropy, epistemic = facts
    return Example(
        index=index, sure=sure, label=names[int(truth)], predicted=names[int(label)], confidence=confidence,
        entropy=entropy, epistemic=epistemic, image=_picture(judge.task.test, index),
    )  # fmt: skip


def _picture(rows: Rows, index: int) -> str | None:
    """A row's image as a PNG data URL; None where rows are no images of bytes."""
    if not isinstance(rows, Split) or rows.x.dtype != torch.uint8 or rows.x.dim() != 4 or rows.x.shape[1] not in (1, 3):
        return None
    from PIL import Image

    pixels = rows.x[index].permute(1, 2, 0).cpu().numpy()
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
