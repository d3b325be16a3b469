"""What a paper claims of the rows of a table, and whether the runs here bear it out.

claims: [{better: rank1-gaussian, than: deterministic, score: nll}]

A claim holds where the 95 % t interval of the paired differences lies on its side of zero, over three seeds at
least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from slimbayes.report.metric import mean, metric, t_interval

FEWEST = 3  # seeds that can decide: two agree by chance half of the time
BySeed = Mapping[int, Mapping[str, float]]  # scores of a row, for each seed
PREFIXES = ("corrupted_", "validation_", "member_")
_LOWER = ("corruption_error", "relative_corruption_error", "error_", "neg_elbo")  # how such names begin


class Claim(BaseModel):
    """One row is better than another in a score; rows by their names in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    better: str
    than: str
    score: str

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is."""
        name = self.score
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        lower = name.startswith(_LOWER) or metric(name).better == "lower"
        if not lower and not name.startswith("snr") and metric(name).better != "higher":
            raise ValueError(f"claims: nobody says whether more or less of {self.score!r} is better.")
        return -1 if lower else 1

    def judged(self, rows: Mapping[str, BySeed]) -> dict[str, Any]:
        """The claim, the mean difference and its interval over the seeds that both rows have, and a verdict.

        Example:
            >>> claim = Claim(better="rank1", than="plain", score="nll")
            >>> plain, rank1 = ({s: {"nll": level + 0.01 * s} for s in range(5)} for level in (0.5, 0.4))
            >>> claim.judged({"plain": plain, "rank1": rank1})["verdict"]
            'holds'
        """
        ours, theirs = rows.get(self.better, {}), rows.get(self.than, {})
        shared = [s for s in ours if s in theirs and self.score in ours[s] and self.score in theirs[s]]
        differences = [ours[s][self.score] - theirs[s][self.score] for s in shared]
        interval = t_interval(differences)
        found = {**self.model_dump(), "seeds": len(shared), "difference": None, "interval": interval}
        if not shared:
            return found | {"verdict": "not run"}
        average = mean(differences)
        if not math.isfinite(average):
            return found | {"verdict": "undecided: a score is not finite"}
        return found | {"difference": average, "verdict": self._verdict(differences, interval)}

    def _verdict(self, differences: Sequence[float], interval: tuple[float, float] | None) -> str:
        agrees = all(self.sign * difference > 0 for difference in differences)
        if interval is None:
            return f"one seed, which {'agrees' if agrees else 'does not agree'}"
        if len(differences) < FEWEST:
            return f"two seeds, which {'agree' if agrees else 'do not both agree'}"
        low, high = sorted(self.sign * end for end in interval)
        return "holds" if low > 0 else "does not hold: it is the other way round" if high < 0 else "undecided"


def told(claims: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> list[str]:
    """Lines about judged claims, as a table has them.

    Example:
        >>> claim = Claim(better="a", than="b", score="nll").judged({})
        >>> told([claim], {"a": "Rank-1", "b": "Plain"})
        ['- Rank-1 better than Plain in nll: **not run**']
    """
    lines = []
    for claim in claims:
        text = (
            f"- {labels[claim['better']]} better than {labels[claim['than']]} in {claim['score'].replace('_', ' ')}: "
        )
        text += f"**{claim['verdict']}**"
        if claim["difference"] is not None:
            text += f", {claim['difference']:+.4g}"
        if claim["interval"] is not None:
            low, high = claim["interval"]
            text += f" [{low:+.4g}, {high:+.4g}] over {claim['seeds']} seeds"
        lines.append(text)
    return lines
