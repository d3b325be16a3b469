"""said_again: what a conversion says beside its methods, for one that takes its place."""

from collections.abc import Callable

from torch import nn

from slimbayes.convert.convert import Conversion, conversions_of
from slimbayes.convert.training import freeze


def said_again(model: nn.Module) -> Callable[..., None]:
    """What a model's conversions say beside their methods: where rows lie, what trains and is saved. The function that
    is returned says it of a conversion that takes their place.
    """
    found = conversions_of(model)
    saved, heads = (
        [".".join(part for part in (root, name) if part) for root, c in found for name in getattr(c, of)]
        for of in ("saved", "heads")
    )
    batch_dim = next((c.batch_dim for _, c in found if c.batch_dim is not None), None)
    frozen = any(c.frozen for _, c in found)

    def say(converted: nn.Module, freezing: bool = True) -> None:
        new: Conversion = converted.__dict__["_slimbayes"]
        new.batch_dim, new.saved, new.heads = batch_dim, saved, heads
        new.frozen = freeze(converted, heads) if frozen and freezing else []

    return say
