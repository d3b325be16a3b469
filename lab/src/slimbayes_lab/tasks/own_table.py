"""Tables of one's own: how a file's rows become the network's, in training and, from what a run keeps, ever after.

look, feature_kind      what a file's columns hold, and what they are taken for: in training only (`read_table`)
frames                  columns of numbers, words and dates of a file
with_dates              numbers in place of dates
Preparation.read        numbers, then codes of words
Preparation.prepare     numbers filled in and scaled: rows as the network takes them
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from slimbayes.columns import Decimal, Kind, number_in
from slimbayes.errors import SlimbayesWarning, brief, did_you_mean
from slimbayes_lab.configs.experiment import Data
from slimbayes_lab.configs.own import feature_kind, say_as_config, target_is_class
from slimbayes_lab.data import Dataset, Split
from slimbayes_lab.data.cells import date_columns
from slimbayes_lab.data.table_files import (
    TABLES,
    Frame,
    TableFile,
    column_names,
    frames,
    look,
)
from slimbayes_lab.tasks.rows import check_names, hold_out

if (
    TYPE_CHECKING
):  # where it is needed it is imported with scikit-learn, which other data do without
    from slimbayes.sklearn.columns import Preparation


@dataclass(frozen=True)
class TableReader:
    """How rows of a table become the network's: what a run keeps of its training data."""

    preparation: Preparation  # codes and scales
    ignored: tuple[
        str, ...
    ]  # columns that a table may have, the target among them, and that are not looked at
    kinds: Mapping[str, Kind]  # of the columns that are read
    header: bool  # whether a file's first line has names
    decimal: Decimal  # what parts a number's whole from its fraction in a file

    def fills(self) -> dict[str, Any]:
        """Arguments of networks that a table decides. Codes of categories are no inputs of a plain network."""
        sizes, width = self.preparation.sizes, self.preparation.width
        return {"numbers": width, "sizes": list(sizes)} | (
            {} if sizes else {"inputs": width}
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        return {
            "preparation": self.preparation.to_dict(),
            "passed": list(self.ignored),
            "header": self.header,
            "kinds": [list(pair) for pair in self.kinds.items()],
            "decimal": self.decimal,
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any] | None) -> Self | None:
        """What `to_dict` wrote down, None where there was no table."""
        if facts is None:
            return None
        from slimbayes.sklearn.columns import Preparation

        learnt = Preparation.from_dict(facts["preparation"])
        return cls(
            learnt,
            tuple(facts["passed"]),
            dict(facts["kinds"]),
            bool(facts["header"]),
            facts["decimal"],
        )

    def blocks(self, file: Path) -> Iterator[Tensor]:
        """Rows of a file as the network takes them, float32 (n, w + c), some at a time; a warning at the end tells of
        categories that training did not see."""
        if file.suffix.lower() not in TABLES:
            raise ValueError(
                f"{file}: the run was trained on a table, so rows come as {', '.join(TABLES)}."
            )
        names, here = (
            column_names(file, self.header, self.decimal),
            {name: name for name in self.kinds},
        )
        if not self.header and len(names) == len(
            here
        ):  # without names and without the target: by their order
            here = dict(zip(here, names, strict=True))
        else:
            check_names(str(file), names, list(here), self.ignored)
        first, unseen = 0, Counter[str]()
        for frame in frames(
            file,
            {here[name]: self.kinds[name] for name in here},
            self.header,
            self.decimal,
        ):
            last = first + len(next(iter(frame.values()))) - 1
            yield self._prepared(
                {n: frame[here[n]] for n in here},
                unseen,
                f"{file}, rows {first} to {last}: ",
            )
            first = last + 1
        if unseen:
            warnings.warn(
                f"{file}: {self.preparation.unseen_text(unseen, first)}",
                SlimbayesWarning,
                stacklevel=2,
            )

    def _prepared(self, frame: Frame, unseen: Counter[str], place: str = "") -> Tensor:
        """Columns as they were read, as the network takes them. Unknown categories that count as missing are added to
        `unseen`."""
        try:
            read = self.preparation.read(
                with_dates(frame, self.kinds, self.preparation.names), unseen=unseen
            )
        except ValueError as error:
            raise ValueError(f"{place}{say_as_config(error)}") from error
        return torch.from_numpy(self.preparation.prepare(read))


@dataclass(frozen=True, kw_only=True)
class OwnTable(Dataset):
    """A table of one's own: rows of numbers and codes, float64 (N, d + c), not scaled yet, and its reader."""

    reader: TableReader

    @property
    def named(self) -> tuple[object, ...]:
        return *super().named, tuple(map(tuple, self.reader.preparation.words.values()))


def with_dates(
    frame: Frame, kinds: Mapping[str, Kind], wanted: Sequence[str] | None = None
) -> Frame:
    """Columns of these kinds, with numbers in place of dates: the wanted ones or, without the cycle of the day where
    there are no times, all."""
    found: dict[str, np.ndarray] = {}
    for name, kind in kinds.items():
        made = (
            date_columns(name, frame[name]) if kind == "date" else {name: frame[name]}
        )
        if clash := next(
            (key for key in made if key in found or (kind == "date" and key in kinds)),
            None,
        ):
            raise ValueError(
                f"column {brief(clash)} has the name of a date's number: give it another."
            )
        if kind == "date" and wanted is None and not (frame[name] % 1 > 0).any():
            made = {
                key: days
                for key, days in made.items()
                if ": day " not in key.removeprefix(name)
            }
        found |= made
    return found if wanted is None else {name: found[name] for name in wanted}


def read_table(path: Path, chosen: Data) -> OwnTable:
    """The table of a config, with codes of the categories that its training rows have."""
    from slimbayes.sklearn.columns import Preparation

    found = look(path, chosen.header, chosen.decimal)
    _check_names_of(chosen, found)
    assert chosen.target is not None
    left_out, dates = {chosen.target, *chosen.drop}, chosen.dates == "encode"
    used = [column for name, column in found.columns.items() if name not in left_out]
    kinds = {
        column.name: feature_kind(column, path, chosen.categories, dates)
        for column in used
    }
    if not kinds:
        raise ValueError(
            f"{path} has no column beside the target and those that are dropped."
        )
    discrete = target_is_class(found.columns[chosen.target], path, chosen.task)
    target: Kind = "word" if discrete else "number"
    blocks = list(
        frames(path, kinds | {chosen.target: target}, found.header, found.decimal)
    )
    whole = {
        name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]
    }
    y, classes = _targets(whole[chosen.target], discrete)
    train, test = hold_out(Split(torch.arange(len(y)), y), "test", chosen.test, chosen)
    preparation = Preparation(
        chosen.missing,
        chosen.scaling if chosen.scaling in ("quantile", "standard") else "none",
    )
    try:
        every, words = (
            with_dates(whole, kinds),
            [name for name, kind in kinds.items() if kind == "word"],
        )
        preparation.fit(
            every, words, train.x.numpy()
        )  # categories of test rows alone stay unseen
        read = torch.from_numpy(preparation.read(every))
    except ValueError as error:
        raise ValueError(f"{path}: {say_as_config(error)}") from error
    splits = {
        "train": Split(read[train.x], train.y),
        "test": Split(read[test.x], test.y),
    }
    ignored = tuple(name for name in found.columns if name in left_out)
    reader = TableReader(preparation, ignored, kinds, found.header, found.decimal)
    return OwnTable(
        chosen.name,
        splits,
        classes,
        columns=(*preparation.numbers, *preparation.words),
        reader=reader,
    )


def _check_names_of(chosen: Data, found: TableFile) -> None:
    """Refuse options that name columns which a table does not have."""
    for option, wanted in {
        "target": [chosen.target],
        "categories": chosen.categories,
        "drop": chosen.drop,
    }.items():
        for name in wanted:
            if name not in found.columns:
                hint = did_you_mean(str(name), found.columns)
                raise ValueError(
                    f"data.{option}: {found.file} has no column {brief(name)}{hint}"
                )


def _targets(values: np.ndarray, discrete: bool) -> tuple[Tensor, tuple[str, ...]]:
    if not discrete:
        return real_targets(values), ()
    words: Mapping[str, int] = {
        word: i for i, word in enumerate(sorted(set(values.tolist()), key=_by_number))
    }
    return torch.tensor([words[word] for word in values.tolist()]), tuple(words)


def _by_number(word: str) -> tuple[float, str]:
    """Classes that are numbers in their order, then others by the alphabet."""
    number = number_in(word)
    return float("inf") if number is None else number, word


def real_targets(values: np.ndarray) -> Tensor:
    """Real targets (N, T): in float64 where float32 would move them by more than a millionth of their deviation, as it
    does times in seconds and large sums in cents."""
    wide = values.astype(np.float64)
    single = wide.astype(np.float32)
    kept = wide if (np.abs(wide - single) > 1e-6 * wide.std(0)).any() else single
    return torch.from_numpy(kept[:, None] if kept.ndim == 1 else kept)
