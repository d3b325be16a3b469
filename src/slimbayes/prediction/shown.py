"""A figure that notebooks show by themselves. It needs matplotlib, so nothing imports it before a plot is made."""

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """matplotlib's own figures are shown only once pyplot is there."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()
