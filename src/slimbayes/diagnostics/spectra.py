"""spectrum: how much of the posterior means and of the standard deviations the first few singular values explain.

    explained_k = gamma_k^2 / sum_i gamma_i^2          gamma: singular values of the m x n matrix view, not centred

Trained mean-field posteriors have standard deviations of nearly rank one or two, while their means have not
(Swiatkowski et al. 2020, Figures 3, 5 and 12): where that holds, a k-tied posterior loses little.

Nothing is centred, so a matrix that hardly varies is of rank one to begin with: the first singular value explains 99 %
of independent scales that spread by 10 %. Look at how the rest falls with k, and at the ELBO after `truncate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from slimbayes.convert.plan import Selection
from slimbayes.diagnostics.sites import gaussian_sites
from slimbayes.errors import did_you_mean

Of = Literal["means", "scales"]


@dataclass(frozen=True)
class SiteSpectrum:
    """Singular values of one weight matrix's posterior, largest first.

    Attributes:
        name: the layer's name and the weight's.
        shape: (m, n) of the matrix view.
        means, scales: singular values of the posterior means and of the posterior standard deviations.

    Example:
        >>> SiteSpectrum("fc", (2, 2), means=(1.0, 1.0), scales=(3.0, 1.0)).explained("scales")
        (0.9, 0.1)
    """

    name: str
    shape: tuple[int, int]
    means: tuple[float, ...]
    scales: tuple[float, ...]

    def explained(self, of: Of = "scales") -> tuple[float, ...]:
        """Fraction of the variance that each singular value explains; the fractions sum to one."""
        if of not in ("means", "scales"):
            raise ValueError(f"Unknown spectrum {of!r}{did_you_mean(str(of), ('means', 'scales'))}")
        squares = [value**2 for value in (self.means if of == "means" else self.scales)]
        total = sum(squares) or 1.0  # a matrix of zeros has no variance to explain
        return tuple(square / total for square in squares)

    def first(self, count: int, of: Of = "scales") -> float:
        """Fraction of the variance that the first `count` singular values explain together."""
        return sum(self.explained(of)[:count])


@dataclass(frozen=True)
class Spectrum:
    """Spectra of all weight matrices with Gaussian posteriors. `str()` gives a table."""

    sites: tuple[SiteSpectrum, ...]

    def __getitem__(self, name: str) -> SiteSpectrum:
        """The spectrum of one weight, by its name or, if it is the layer's only one, the layer's."""
        found = [s for s in self.sites if s.name == name] or [
            s for s in self.sites if s.name.rpartition(".")[0] == name
        ]
        if len(found) != 1:
            known = [s.name for s in self.sites]
            raise KeyError(f"{name!r} names {len(found)} weights of this spectrum{did_you_mean(name, known)}")
        return found[0]

    def __str__(self) -> str:
        shapes = [f"{s.shape[0]} x {s.shape[1]}" for s in self.sites]
        name, shape = max(22, *(len(s.name) for s in self.sites)), max(map(len, shapes))
        lines = [f"{'variance':<{name}}  {'':>{shape}}  {'means':<25}  standard deviations"]
        lines.append(f"{'explained by the first':<{name}}  {'':>{shape}}" + 2 * "       1        2        3".rjust(27))
        lines.append("-" * len(lines[-1]))
        for s, size in zip(self.sites, shapes, strict=True):
            cells = "".join(f"{s.first(k, of):9.2%}" for of in ("means", "scales") for k in (1, 2, 3))
            lines.append(f"{s.name:<{name}}  {size:>{shape}}{cells}")
        return "\n".join(lines)


@torch.no_grad()
def spectrum(model: nn.Module, include: Selection = None, exclude: Selection = None) -> Spectrum:
    """Singular values of the means and of the standard deviations of every Gaussian posterior of a model.

    Args:
        model: converted with `MeanField`, `KTied` or `MatrixNormal`; layers with other posteriors are passed over.
        include, exclude: layers to look at, as in `bayesianize`.

    Shape: matrices are inputs by outputs; a convolution's is (inputs x kernel) by outputs, an LSTM's inputs by 4 units.

    Example:
        >>> import slimbayes as sb
        >>> net = sb.bayesianize(nn.Sequential(nn.Linear(20, 10)), sb.KTied(rank=1))
        >>> round(spectrum(net)["0"].first(1), 6), spectrum(net)["0"].first(1, "means") < 0.5
        (1.0, True)
    """
    found = []
    for site in gaussian_sites(model, include, exclude):
        means, scales = (tuple(torch.linalg.svdvals(matrix).tolist()) for matrix in (site.means(), site.scales()))
        found.append(SiteSpectrum(site.name, site.posterior.site.matrix, means, scales))
    return Spectrum(tuple(found))
