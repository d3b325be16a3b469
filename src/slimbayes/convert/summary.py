"""summary and estimate_cost: what a conversion did, layer by layer, and what one would cost."""

import html
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from slimbayes.convert.bayesianize import decisions_of
from slimbayes.convert.plan import Decision, Selection, plan
from slimbayes.engine.calls import count_members
from slimbayes.engine.passes import posteriors_of
from slimbayes.layers import bayes_class, class_for, kind_of
from slimbayes.layers.base import Converted, sites_of
from slimbayes.posteriors.configs.base import Config


@dataclass(frozen=True)
class Row:
    """One layer of a summary. `before` counts the layer's own parameters, `after` those and its posterior's."""

    name: str
    layer: str
    status: str  # "converted" or "skipped"
    detail: str  # the method, or the reason
    before: int
    after: int


@dataclass(frozen=True, repr=False)
class Summary:
    """Every layer with parameters, converted or skipped and why. `str()` gives a table, `to_dict()` plain data.

    Parameters shared by several layers are counted once, where they first appear.
    """

    rows: tuple[Row, ...]
    log_ensemble_size: float = (
        0.0  # natural logarithm: the number itself soon exceeds what a float holds
    )
    at_least: bool = False  # dropout's units are only known when it runs

    @property
    def ensemble_size(self) -> str:
        """How many different networks the posterior holds: a product over layers, infinitely many for real numbers."""
        if self.at_least and not self.log_ensemble_size:
            return "2^units, as many as its dropout layers see"
        if math.isinf(self.log_ensemble_size):
            return "infinite (continuous)"
        exponent = self.log_ensemble_size / math.log(10)
        size = (
            f"{round(math.exp(self.log_ensemble_size)):,}"
            if exponent < 6
            else f"10^{exponent:,.1f}"
        )
        return f"at least {size}" if self.at_least else size

    @property
    def before(self) -> int:
        """Parameters of the plain model."""
        return sum(r.before for r in self.rows)

    @property
    def after(self) -> int:
        """Parameters of the converted model."""
        return sum(r.after for r in self.rows)

    def to_dict(self) -> dict[str, Any]:
        size = None if math.isinf(self.log_ensemble_size) else self.log_ensemble_size
        counts = {"before": self.before, "after": self.after, "log_ensemble_size": size}
        return {**counts, "layers": [asdict(r) for r in self.rows]}

    def _cells(self) -> list[tuple[str, ...]]:
        """The table, its head first."""
        cells = [
            (
                r.name or "(model)",
                r.layer,
                r.status,
                f"{r.before:,}",
                f"{r.after:,}",
                r.detail,
            )
            for r in self.rows
        ]
        return [
            ("layer", "type", "status", "before", "after", "method or reason"),
            *cells,
        ]

    def __str__(self) -> str:
        lines = self._cells()
        a, b, c, d, e = (max(len(line[i]) for line in lines) for i in range(5))
        text = [
            f"{n:{a}}  {t:{b}}  {s:{c}}  {x:>{d}}  {y:>{e}}  {why}".rstrip()
            for n, t, s, x, y, why in lines
        ]
        text.insert(1, "-" * min(110, max(len(t) for t in text)))
        return "\n".join([*text, self._total()])

    def _total(self) -> str:
        extra = (self.after - self.before) / max(self.before, 1)
        converted = sum(r.status == "converted" for r in self.rows)
        return (
            f"{converted} of {len(self.rows)} layers converted; {self.before:,} -> {self.after:,} parameters "
            f"({extra:+.2%}); effective ensemble size {self.ensemble_size}"
        )

    def __repr__(self) -> str:
        return f"Summary({self._total()})"

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        heads, *cells = self._cells()
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>"
            for line in cells
        )
        head = "".join(f"<th>{name}</th>" for name in heads)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<div>{table}<p>{html.escape(self._total())}</p></div>"


def summary(model: nn.Module) -> Summary:
    """List every layer of a converted model that has parameters: converted or skipped, why, and its parameter counts.

    Example:
        >>> import slimbayes as sb
        >>> net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
        >>> report = summary(sb.bayesianize(net, sb.Rank1(members=2)))
        >>> [(r.name, r.status) for r in report.rows]
        [('0', 'skipped'), ('1', 'converted')]
        >>> report.before, report.after  # 2 members x 2 numbers for each of 4 + 3 factors, and one more bias of 3
        (55, 86)
    """
    rows, seen = [], set[int]()
    listed: set[str] = set()
    for name, layer, decision in decisions_of(model):
        if (
            layer is None
            or name in listed
            or (decision.config is None and isinstance(layer, Converted))
        ):
            continue  # removed since; or a conversion of an inner module speaks for it
        listed.add(name)
        posterior = (
            list(layer.posterior.parameters()) if isinstance(layer, Converted) else []
        )
        before = _count(_own_parameters(layer), seen)
        status, detail = _status_and_detail(decision, layer)
        rows.append(
            Row(
                name,
                decision.kind,
                status,
                detail,
                before,
                before + _count(posterior, seen),
            )
        )
    posteriors = posteriors_of(model)
    # Members are shared by all layers and count once; what layers pick by themselves multiplies.
    size = sum(p.log_size for p in posteriors) + math.log(count_members(posteriors))
    return Summary(
        tuple(rows), size, any(p.late for p in posteriors) and math.isfinite(size)
    )


def _status_and_detail(decision: Decision, layer: nn.Module) -> tuple[str, str]:
    """Status and detail of a layer, as it is now."""
    if decision.config is None:
        return "skipped", decision.reason
    if not isinstance(layer, Converted):
        return "skipped", "replaced or undone since the conversion"
    tied = "" if decision.tied is None else f"shares the posterior of {decision.tied}"
    notes = [
        decision.config.describe(),
        tied,
        layer.bayes_note,
        *(p.note for p in layer.posteriors()),
    ]
    return "converted", "; ".join(dict.fromkeys(note for note in notes if note))


def _own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Parameters a layer answers for: its own, and those inside it where it owns its submodules."""
    whole = isinstance(layer, Converted) or bayes_class(layer) is not None
    return [
        p
        for n, p in layer.named_parameters(recurse=whole)
        if not n.startswith("posterior.")
    ]


def _count(parameters: list[nn.Parameter], seen: set[int]) -> int:
    fresh = [p for p in parameters if id(p) not in seen and not nn.parameter.is_lazy(p)]
    seen.update(id(p) for p in fresh)
    return sum(p.numel() for p in fresh)


@dataclass(frozen=True)
class Cost:
    """What a conversion adds.

    Attributes:
        parameters: parameters of the plain model.
        extra_parameters: parameters of all posteriors.
        extra_bytes: their size in memory (gradients and optimizer state come on top, as for any parameter).
        relative_flops: arithmetic of one draw at one position of each layer relative to the plain model's, at least 1.
            What happens once a pass, as drawing a matrix of weights, is not in it: a large batch shares it.
        forwards: how many times one `sample(model, x)` pays that price: the number of members.
    """

    parameters: int
    extra_parameters: int
    extra_bytes: int
    relative_flops: float
    forwards: int

    @property
    def relative_parameters(self) -> float:
        """Extra parameters as a fraction of the plain model's."""
        return self.extra_parameters / max(self.parameters, 1)


def estimate_cost(
    model: nn.Module,
    config: Config | Mapping[str, Config],
    include: Selection = None,
    exclude: Selection = None,
) -> Cost:
    """What `bayesianize` with these arguments would cost, without changing the model or allocating its posteriors.

    Example:
        >>> import slimbayes as sb
        >>> cost = estimate_cost(nn.Linear(1000, 1000), sb.Rank1(members=4))
        >>> cost.extra_parameters, round(cost.relative_flops, 4)
        (19000, 1.001)
    """
    decisions = plan(model, config, include, exclude)
    extra: list[Tensor] = []
    forwards, plain_flops, extra_flops = 1, 0.0, 0.0
    for decision in decisions:
        layer, chosen = model.get_submodule(decision.name), decision.config
        # Multiply-adds: one for each weight; a lookup has none.
        weights = (
            []
            if kind_of(layer) == "table"
            else [p for p in _own_parameters(layer) if p.dim() > 1]
        )
        plain_flops += sum(p.numel() for p in weights)
        if chosen is None or decision.tied is not None:
            continue
        cls = None if chosen.whole else class_for(layer, chosen.covers)
        sites = [] if cls is None else sites_of(cls, layer)
        forwards = max(forwards, chosen.members)
        extra += chosen.extra_parameters(layer, sites)
        extra_flops += sum(chosen.extra_flops(site) for site in sites)
    total, added = (
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in extra),
    )
    size = sum(p.numel() * p.element_size() for p in extra)
    return Cost(total, added, size, 1 + extra_flops / max(plain_flops, 1), forwards)
