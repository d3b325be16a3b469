"""Why a method's NLL is above the plain network's, as far as records tell: what it lost on training rows, its KL, what
it was still learning, and what more draws gave it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from slimbayes.report.groups import Group, Selection, main_set
from slimbayes.report.record import Record
from slimbayes.report.statistics import bootstrap_interval, mean

PLAIN = "Deterministic"
_LATE = 0.1  # the end of training, as a share of its epochs


def reasons(groups: Sequence[Group]) -> Iterator[str]:
    """A note about each method whose mean NLL is above that of the plain network on the same data.

    Example:
        >>> list(reasons([]))
        []
    """
    for data in dict.fromkeys(group.data for group in groups):
        mine = [group for group in groups if group.data == data]
        judged = main_set(mine)
        plain = next((group for group in mine if group.records[0].method == PLAIN), None)
        for group in mine if plain else ():
            assert plain is not None
            ours, theirs = (judged.by_seed(one, "nll") for one in (group, plain))
            differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
            if group is not plain and differences and mean(differences) > 0:
                told = f"{group.name!r} on {data!r} has an NLL of {mean(list(ours.values())):.3f} against "
                told += f"{mean(list(theirs.values())):.3f} of {plain.name!r}{_doubt(differences)}. "
                yield told + _cause(group, plain, mean(differences)) + _draws(group, judged, mean(differences))


def _doubt(differences: Sequence[float]) -> str:
    """What seeds say about a difference."""
    interval = bootstrap_interval(differences)
    if interval is None:
        return ", with one seed in common"
    return f", within what {len(differences)} seeds differ by" if interval[0] <= 0 else ""


def _cause(group: Group, plain: Group, gap: float) -> str:
    """Whether it fits less or predicts worse, and what keeps it from fitting."""
    ours, theirs = (mean([record.curve[-1].get("nll", math.nan) for record in one.records if record.curve])
                    for one in (group, plain))  # fmt: skip
    lost = ours - theirs
    if not math.isfinite(lost):
        return "The records hold no losses of training that could say why."
    both = f"a draw's NLL on training rows is {ours:.3f} against {theirs:.3f}"
    if lost < gap / 2:
        return f"It fits nearly as well ({both}) and predicts other rows worse: it overfits, or by chance."
    ends = [record.curve[-1] for record in group.records if record.curve]
    kl = mean([end.get("kl", 0.0) * end.get("kl_weight", 1.0) for end in ends])
    falling = mean([_late_fall(record) for record in group.records])
    if falling > lost / 2:
        epochs = len(group.records[0].curve)
        return f"It fits less ({both}), and was still learning: {falling:.3f} in the last tenth of {epochs} epochs."
    if kl > lost:
        return f"It fits less ({both}): its KL of {kl:.3f} a row outweighs that. A lower temperature weighs it less."
    return f"It fits less ({both}): the noise of its draws costs that; its KL is {kl:.3f} a row."


def _late_fall(record: Record) -> float:
    """By how much the training NLL fell at the end."""
    nll = [row["nll"] for row in record.curve if "nll" in row]
    late = max(1, round(_LATE * len(nll)))
    return nll[-1 - late] - nll[-1] if len(nll) > late else 0.0


def _draws(group: Group, judged: Selection, gap: float) -> str:
    """What more draws gave it, where that is a good part of what is missing."""
    counts = judged.draw_counts(group)
    if len(counts) < 2:
        return ""
    few, many = (mean(list(replace(judged, draws=n).by_seed(group, "nll").values())) for n in counts[-2:])
    return (
        f" From {counts[-2]} to {counts[-1]} draws it gained {few - many:.3f}: take more."
        if few - many > gap / 4
        else ""
    )
