"""Health records: bags against a slow loop, the readers on small files of the true formats and on the real set, the
paper's seven variants."""

import io
import lzma
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import each
from slimbayes_lab.data.events import Buckets, Events, bag
from slimbayes_lab.data.physionet import FEATURES, bags, physionet2012
from slimbayes_lab.data.stays import Stays, mortality
from slimbayes_lab.models import keras_count
from slimbayes_lab.models.recurrent import mortality_lstm
from slimbayes_lab.papers.rows import find
from torch import Tensor

import slimbayes as sb

# The methods of the paper's Table 4, as the papers' names are in kept records.
NAMES = (
    "deterministic", "BatchEnsemble", "Bayesian embeddings", "fully Bayesian", "rank-1 Gaussian", "rank-1 Cauchy",
    "deep ensemble",
)  # fmt: skip
VARIANTS = {
    name: row.experiment().method.build()
    for name, row in zip(NAMES, find("rank1/table4"), strict=True)
}
REAL = Path(
    os.environ.get("SLIMBAYES_DATA", Path(__file__).parents[4] / "shared" / "data")
)
PACKED = REAL / "physionet2012" / "challenge2012.npz.xz"
real = pytest.mark.skipif(
    not PACKED.is_file(), reason=f"NOT TESTED ON REAL DATA: {PACKED} is missing"
)


def make_events(count: int = 400, patients: int = 5, before: float = 0.0) -> Events:
    """Minutes over three days, so a third lies after 48 h; one value in five is missing."""
    hours = torch.randint(0, 72 * 60, (count,)).double() / 60 - before
    value = torch.randn(count).masked_fill(torch.rand(count) < 0.2, math.nan)
    return Events(
        torch.randint(0, patients, (count,)),
        hours,
        torch.randint(0, 3, (count,)),
        value,
        patients,
        ("x", "y", "z"),
    )


def join(*parts: Events) -> Events:
    columns = (
        torch.cat([getattr(e, name) for e in parts])
        for name in ("patient", "hours", "feature", "value")
    )
    return Events(*columns, parts[0].patients, parts[0].features)


def contents(tokens: Tensor) -> list[list[list[int]]]:
    return [
        [sorted(t for t in step if t) for step in patient]
        for patient in tokens.tolist()
    ]


# Buckets and bags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_buckets_are_numpys_quantiles_of_what_was_known(count: int) -> None:
    events = make_events()
    buckets = Buckets.fit(events, hours=48.0, count=count)
    tokens = buckets.tokens(events)
    for feature in range(3):
        known = (
            (events.feature == feature) & (events.hours <= 48) & ~events.value.isnan()
        )
        quantiles = np.quantile(
            events.value[known].cpu().numpy().astype("float64"),
            np.arange(1, count) / count,
        )
        np.testing.assert_allclose(
            buckets.edges[feature].cpu().numpy(), quantiles, rtol=1e-5, atol=1e-6
        )
        shares = (tokens[known] - 2 - feature * (count + 1)).bincount(
            minlength=count
        ) / known.sum()
        assert len(shares) == count and float((shares - 1 / count).abs().max()) < 0.03
    assert (
        tokens[events.value.isnan()]
        == 1 + events.feature[events.value.isnan()] * (count + 1)
    ).all()
    assert (
        buckets.vocabulary
        == len(buckets.names())
        == 1 + 3 * (count + 1)
        > int(tokens.max())
    )


def test_buckets_of_constant_and_unseen_features() -> None:
    constant = Events(
        torch.zeros(4).long(),
        torch.zeros(4).double(),
        torch.zeros(4).long(),
        torch.ones(4),
        1,
        ("a", "b"),
    )
    later = Events(
        torch.zeros(3).long(),
        torch.zeros(3).double(),
        torch.tensor([0, 0, 1]),
        torch.tensor([1.0, 0.0, 9.0]),
        1,
        ("a", "b"),
    )
    same, below, unseen = Buckets.fit(constant, count=5).tokens(later).tolist()
    assert (same, below, unseen) == (6, 2, 8)


def slow_bags(
    events: Events,
    tokens: list[int],
    hours: float,
    precision: float,
    older: float | None,
) -> list[list[list[int]]]:
    """One event at a time, in whole minutes."""
    limit = round(60 * (hours if older is None else min(older, hours)))
    width = round(60 * precision)
    fine = -(-limit // width)
    steps = fine + (older is not None)
    out: list[list[list[int]]] = [
        [[] for _ in range(steps)] for _ in range(events.patients)
    ]
    for patient, hour, token in zip(
        events.patient.tolist(), events.hours.tolist(), tokens, strict=True
    ):
        age = round(60 * hours) - round(60 * hour)
        if age < 0:
            continue
        step = (
            fine if older is not None and age > limit else min(age // width, fine - 1)
        )
        out[patient][steps - 1 - step].append(token)
    return [[sorted(step) for step in patient] for patient in out]


@pytest.mark.parametrize("older", [None, 6.0, 23.5, 48.0, 100.0])
@pytest.mark.parametrize(
    ("hours", "precision"), [(48.0, 1.0), (24.0, 0.1), (48.0, 5.0), (24.0, 24.0)]
)
def test_bags_equal_a_slow_loop(
    hours: float, precision: float, older: float | None
) -> None:
    events = make_events(before=6.0)
    buckets = Buckets.fit(events, hours)
    tokens = bag(events, buckets, hours, precision, older)
    assert tokens.dtype == torch.int32
    assert contents(tokens) == slow_bags(
        events, buckets.tokens(events).tolist(), hours, precision, older
    )


def test_a_full_bag_keeps_the_latest() -> None:
    events = Events(
        torch.zeros(3).long(),
        torch.tensor([1.9, 0.5, 1.2]).double(),
        torch.tensor([2, 0, 1]),
        torch.full((3,), math.nan),
        2,
        ("a", "b", "c"),
    )
    tokens = bag(
        events, Buckets.fit(events, count=1), hours=2.0, precision=2.0, tokens_per_bag=2
    )
    assert tokens.tolist() == [[[3, 5]], [[0, 0]]]  # the second patient has no event


@pytest.mark.parametrize(("most", "at_a_time"), each([None, 1, 3], [1, 7, 100]))
def test_bags_do_not_depend_on_how_many_events_are_sorted_at_a_time(
    at_a_time: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = make_events()
    options = {"precision": 5.0, "aggregate_older_than": 30.0, "tokens_per_bag": most}
    whole = bag(events, Buckets.fit(events), **options)
    monkeypatch.setattr("slimbayes_lab.data.events._AT_A_TIME", at_a_time)
    assert torch.equal(
        bag(events, Buckets.fit(events), **options), whole
    ) and whole.shape[2] == (most or whole.shape[2])
    nobody = events.of(torch.tensor([], dtype=torch.int64))
    assert bag(nobody, Buckets.fit(events), **options).shape == (0, 7, 1)


@pytest.mark.parametrize("hours", [24.0, 48.0])
def test_nothing_after_the_prediction_time_enters(hours: float) -> None:
    known = make_events().until(hours)
    at = torch.full_like(known.hours, hours)
    late = Events(
        known.patient,
        at + 1 / 60,
        known.feature,
        known.value + 100,
        known.patients,
        known.features,
    )
    both = join(late, known)
    buckets, tokens = (
        Buckets.fit(known, hours),
        bag(known, Buckets.fit(known, hours), hours),
    )
    assert torch.equal(Buckets.fit(both, hours).edges, buckets.edges)
    assert torch.equal(bag(both, buckets, hours), tokens)
    on_time = join(
        known,
        Events(
            known.patient,
            at,
            known.feature,
            known.value,
            known.patients,
            known.features,
        ),
    )
    assert int((bag(on_time, buckets, hours) != 0).sum()) == 2 * len(
        known
    )  # the test can fail: a minute earlier they enter


def test_buckets_come_from_training_patients_only() -> None:
    events, rows = (
        make_events(),
        {"train": torch.tensor([3, 0]), "test": torch.tensor([1, 2, 4])},
    )
    labels = torch.tensor([0, 1, 0, 1, 1])
    trained = (events.patient == 0) | (events.patient == 3)
    other = Events(
        events.patient,
        events.hours,
        events.feature,
        torch.where(trained, events.value, 5 - events.value),
        5,
        events.features,
    )
    first, second = (
        mortality(Stays("toy", e, labels, labels, rows)) for e in (events, other)
    )
    assert torch.equal(first.train.x, second.train.x) and not torch.equal(
        first.test.x, second.test.x
    )
    assert first.train.y.tolist() == [1, 0] and first.test.y.tolist() == [1, 0, 1]
    alone = events.of(torch.tensor([3]))
    assert (
        contents(first.train.x)[0]
        == contents(bag(alone, Buckets.fit(events.of(rows["train"]))))[0]
    )


def test_refusals_of_events_and_bags() -> None:
    events = make_events(4)
    for change, message in (
        (
            {"patient": torch.tensor([0, 1, 9, 0])},
            "Event 2: its patient is not one of 0..4",
        ),
        (
            {"feature": torch.tensor([0, -1, 0, 0])},
            "Event 1: its feature is not one of 0..2",
        ),
        (
            {"hours": torch.tensor([0.0, 0.0, 0.0, math.nan]).double()},
            "Event 3: its time",
        ),
        ({"hours": torch.zeros(4)}, "hours must be float64.*got torch.float32"),
        ({"value": torch.tensor([0.0, math.inf, 0.0, 0.0])}, "Event 1: its value"),
        ({"value": torch.zeros(3)}, "a patient, time, feature and value"),
    ):
        with pytest.raises(ValueError, match=message):
            Events(**(vars(events) | change))
    with pytest.raises(ValueError, match="1 repeats"):
        events.of(torch.tensor([1, 1]))
    for options in (
        {"hours": 0.0},
        {"precision": 0.0},
        {"aggregate_older_than": -1.0},
        {"tokens_per_bag": 0},
    ):
        with pytest.raises(ValueError, match="must be positive"):
            bag(events, Buckets.fit(events), **options)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Buckets.fit(events, count=0)
    with pytest.raises(ValueError, match="no split 'train'"):
        mortality(
            Stays(
                "toy",
                events,
                torch.zeros(5).long(),
                torch.arange(5),
                {"test": torch.arange(5)},
            )
        )


# PhysioNet 2012 -----------------------------------------------------------------------------------------------------

HEAD = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death\n"
STAY = (
    "Time,Parameter,Value\n00:00,RecordID,{}\n00:00,Age,54\n00:00,Gender,0\n00:00,Height,-1\n00:00,ICUType,4\n"
    "00:07,HR,73.5\n13:37,,-1\n47:59,MechVent,1\n"
)
EVENTS = [
    (0.0, "Age", 54.0),
    (0.0, "Gender=0", None),
    (0.0, "ICUType=4", None),
    (7 / 60, "HR", 73.5),
    (2879 / 60, "MechVent=1", None),
]


def write_text(folder: Path) -> Path:
    for letter, records in {
        "a": (140101, 132539),
        "b": (142675,),
        "c": (152871,),
    }.items():
        (folder / f"set-{letter}").mkdir()
        rows = (f"{record},6,1,5,-1,{record % 2}\n" for record in records)
        (folder / f"Outcomes-{letter}.txt").write_text(HEAD + "".join(rows))
        for record in records:
            (folder / f"set-{letter}" / f"{record}.txt").write_text(STAY.format(record))
    return folder


def write_packed(folder: Path, **change: Any) -> Path:
    """The same four stays as `write_text` gives, sorted by parameter, record and time."""
    names = ["Age", "Gender", "HR", "Height", "ICUType", "MechVent"]
    records = np.array([140101, 132539, 142675, 152871], "int32")
    minutes, values = (
        {"HR": 7, "MechVent": 47 * 60 + 59},
        {"Age": 54, "Gender": 0, "HR": 73.5, "Height": -1, "ICUType": 4, "MechVent": 1},
    )
    table = np.unique(np.array(list(values.values()), "float32"))
    outcomes = np.zeros((4, 6), "int32")
    outcomes[:, 0], outcomes[:, 5] = records, records % 2
    arrays = {
        "record_id": records, "set": np.array([97, 97, 98, 99], "uint8"),
        "param_names": np.array(names), "count": np.ones((6, 4), "uint16"),
        "time_min": np.repeat([minutes.get(n, 0) for n in names], 4).astype("uint16"), "value_table": table,
        "value_code": np.repeat([np.searchsorted(table, values[n]) for n in names], 4).astype("uint16"),
        "outcomes": outcomes, "outcome_names": np.array(HEAD.strip().split(",")),
    }  # fmt: skip
    stream = io.BytesIO()
    np.savez(stream, **(arrays | change))
    (folder / PACKED.name).write_bytes(lzma.compress(stream.getvalue()))
    return folder


def listed(events: Events, patient: int) -> list[tuple[float, str, float | None]]:
    rows = events.patient == patient
    columns = (
        events.hours[rows].tolist(),
        events.feature[rows].tolist(),
        events.value[rows].tolist(),
    )
    triples = [
        (h, FEATURES[f], None if math.isnan(v) else v)
        for h, f, v in zip(*columns, strict=True)
    ]
    return sorted(triples, key=lambda event: (event[0], event[1], event[2] or 0.0))


@pytest.mark.parametrize("write", [write_text, write_packed])
def test_physionet_formats(write: Any, tmp_path: Path) -> None:
    stays = physionet2012(write(tmp_path))
    assert stays.records.tolist() == [140101, 132539, 142675, 152871]
    assert stays.labels.tolist() == [1, 1, 1, 1]
    assert {name: rows.tolist() for name, rows in stays.splits.items()} == {
        "train": [0, 1],
        "validation": [2],
        "test": [3],
    }
    assert [listed(stays.events, i) for i in range(4)] == [EVENTS] * 4
    found = bags(tmp_path)
    assert found is not None and {
        name: len(read()) for name, read in found.splits.items()
    } == {
        "train": 2,
        "validation": 1,
        "test": 1,
    }
    train = found.splits["train"]()
    assert train.x.shape == (2, 48, 4) and train.y.tolist() == [1, 1]
    assert len(found.vocabulary()) == 1 + 6 * len(FEATURES)


def test_no_outcome_is_a_feature() -> None:
    assert not {"RecordID", *HEAD.strip().split(",")} & {
        name.split("=")[0] for name in FEATURES
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("00:10,HR", "line 10: 2 cells"),
        ("", "line 10: 0 cells"),
        ("0:10,HR,70", "line 10: expected hh:mm"),
        ("00:60,HR,70", "line 10: expected hh:mm"),
        ("00:10,HR,fast", "line 10: 'fast' is not a finite number"),
        ("00:10,HR,nan", "line 10: 'nan' is not"),
        ("00:10,HR,1e39", "line 10: '1e39' is not"),
        ("00:10,Heart,70", "line 10: 'Heart' is not one of the challenge's parameters"),
        ("00:10,ICUType,5", r"line 10: ICUType 5 is not one of \(1, 2, 3, 4\)"),
        (
            "00:10,RecordID,132539",
            "line 10: RecordID 132539; the file must say 132539, once",
        ),
    ],
)
def test_physionet_bad_rows_are_named(row: str, message: str, tmp_path: Path) -> None:
    file = write_text(tmp_path) / "set-a" / "132539.txt"
    file.write_text(file.read_text() + row + "\n")
    with pytest.raises(ValueError, match=f"set-a/132539.txt, {message}"):
        physionet2012(tmp_path)


def test_physionet_bad_files_are_named(tmp_path: Path) -> None:
    folder = write_text(tmp_path)
    file, outcomes = folder / "set-b" / "142675.txt", folder / "Outcomes-b.txt"
    stay, table = file.read_text(), outcomes.read_text()
    for path, text, message in (
        (
            file,
            "",
            "142675.txt, line 1: the columns Time, Parameter, Value are missing",
        ),
        (file, "Time,Parameter,Value\n", "142675.txt: no line says RecordID 142675"),
        (file, stay.replace("142675", "142676"), "142675.txt, line 2: RecordID 142676"),
        (
            outcomes,
            table + "142675,1,1,1,-1,0\n",
            "Outcomes-b.txt, line 3: record 142675 is there twice",
        ),
        (outcomes, table + "142676,1,1,1,-1,2\n", "Outcomes-b.txt, line 3: .* '2'"),
        (outcomes, table + "142676,1,1,1,-1,0\n", "set-b: 142676.txt is missing"),
        (outcomes, HEAD, "set-b: 142675.txt has no outcome"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            physionet2012(folder)
        file.write_text(stay)
        outcomes.write_text(table)
    (folder / "set-c" / "142675.txt").write_text(stay)
    (folder / "Outcomes-c.txt").write_text(
        (folder / "Outcomes-c.txt").read_text() + "142675,1,1,1,-1,0\n"
    )
    with pytest.raises(ValueError, match="record 142675 is in two sets"):
        physionet2012(folder)
    outcomes.unlink()
    with pytest.raises(FileNotFoundError, match="Outcomes-b.txt"):
        physionet2012(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": np.ones((6, 3), "uint16")}, "the array count"),
        ({"value_code": np.full(24, 6, "uint16")}, "the array value_code"),
        ({"value_table": np.full(6, np.nan, "float32")}, "the array value_table"),
        ({"set": np.array([97, 97, 98, 100], "uint8")}, "the array set"),
        ({"outcomes": np.full((4, 6), 2)}, "the array outcomes"),
        ({"record_id": np.arange(4)}, "the array record_id"),
        (
            {
                "param_names": np.array(
                    ["Age", "Gender", "HR", "Height", "ICUType", "Heart"]
                )
            },
            "'Heart' is not one of",
        ),
    ],
)
def test_physionet_bad_arrays_are_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"challenge2012.npz.xz.*{message}"):
        physionet2012(write_packed(tmp_path, **change))


def test_physionet_cut_short(tmp_path: Path) -> None:
    file = write_packed(tmp_path) / PACKED.name
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="challenge2012.npz.xz is cut short"):
        physionet2012(tmp_path)
    assert bags(tmp_path / "nowhere") is None


@pytest.fixture(scope="module")
def stays() -> Stays:
    return physionet2012(PACKED.parent)


@pytest.mark.slow
@real
def test_the_real_set(stays: Stays, tmp_path: Path) -> None:
    """Counts and deaths of its README; 13.85 % of set a died, as published. Six stays written as official text read
    back the same."""
    assert {name: len(rows) for name, rows in stays.splits.items()} == {
        "train": 4000,
        "validation": 4000,
        "test": 4000,
    }
    assert {
        name: int(stays.labels[rows].sum()) for name, rows in stays.splits.items()
    } == {
        "train": 554,
        "validation": 568,
        "test": 585,
    }
    assert len(stays.events) == 5_271_415 - 6_963  # measurements less those of -1
    assert (
        float(stays.events.hours.max()) == 48.0
        and float(stays.events.hours.min()) == 0.0
    )
    (tmp_path / "set-a").mkdir()
    rows = [
        f"{record},1,1,1,-1,{label}\n"
        for record, label in zip(
            stays.records[:6].tolist(), stays.labels[:6].tolist(), strict=True
        )
    ]
    (tmp_path / "Outcomes-a.txt").write_text(HEAD + "".join(rows))
    few = stays.events.of(torch.arange(6))
    for patient, record in enumerate(stays.records[:6].tolist()):
        lines = [f"00:00,RecordID,{record}\n"]
        for hour, name, value in listed(few, patient):
            minutes = round(60 * hour)
            name, _, category = name.partition("=")
            lines.append(
                f"{minutes // 60:02}:{minutes % 60:02},{name},{category if value is None else value}\n"
            )
        (tmp_path / "set-a" / f"{record}.txt").write_text(
            "Time,Parameter,Value\n" + "".join(lines)
        )
    text = physionet2012(tmp_path)
    assert [listed(text.events, i) for i in range(6)] == [
        listed(few, i) for i in range(6)
    ]
    assert text.labels.tolist() == stays.labels[:6].tolist()


# The network --------------------------------------------------------------------------------------------------------


def test_padding_and_order_of_tokens_do_not_matter() -> None:
    net = mortality_lstm(20, embedding=4, units=6, hidden=5)
    tokens = torch.randint(1, 20, (3, 7, 4))
    tokens[1, 2, 2:] = 0
    tokens[2, 5] = 0  # an empty bag
    padded = torch.cat([torch.zeros_like(tokens), tokens.flip(-1)], -1)
    torch.testing.assert_close(net(padded), net(tokens))
    table = net.embedding.weight
    means = torch.stack(
        [
            torch.stack(
                [
                    table[bag[bag != 0]].mean(0) if bag.any() else torch.zeros(4)
                    for bag in row
                ]
            )
            for row in tokens
        ]
    )
    state = net.lstm(means)[1][0][0]
    torch.testing.assert_close(
        net(tokens), net.output(net.hidden(state).clamp(0, 6)).squeeze(-1)
    )


def formula(name: str, v: int, e: int, u: int, h: int, k: int = 4) -> int:
    """Parameters with one LSTM bias; members add factors for both sides of each matrix and k - 1 bias offsets."""
    table, kernels, biases = v * e, 4 * u * (e + u) + u * h + h, 4 * u + h + 1
    factors = k * ((e + 4 * u) + (u + 4 * u) + (u + h) + (h + 1))
    plain, offsets = table + kernels + biases, (k - 1) * biases
    return {
        "deterministic": plain,
        "BatchEnsemble": plain + factors + offsets,
        "Bayesian embeddings": plain + table,
        "fully Bayesian": plain + table + kernels,
        "rank-1 Gaussian": plain + table + 2 * factors + offsets,
        "rank-1 Cauchy": plain + table + 2 * factors + offsets,
        "deep ensemble": k * plain,
    }[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_trains_and_predicts(name: str) -> None:
    net = sb.bayesianize(
        mortality_lstm(30, embedding=4, units=6, hidden=5), VARIANTS[name]
    )
    assert keras_count(net) == formula(name, 30, 4, 6, 5)
    tokens, died = torch.randint(0, 30, (8, 5, 3)), torch.randint(0, 2, (8,)).float()
    before = {
        n: p.detach().clone() for n, p in net.named_parameters() if p.requires_grad
    }
    terms = sb.elbo(sb.bernoulli(sb.sample(net, tokens), died), net, num_data=100)
    assert bool(terms.kl > 0) == (
        name not in ("deterministic", "BatchEnsemble", "deep ensemble")
    )
    terms.loss.backward()
    torch.optim.SGD(net.parameters(), lr=1e-3).step()
    still = [
        n
        for n, p in net.named_parameters()
        if n in before and torch.equal(p, before[n])
    ]
    assert not still, still
    members = (
        4
        if name
        in ("BatchEnsemble", "rank-1 Gaussian", "rank-1 Cauchy", "deep ensemble")
        else 1
    )
    assert sb.members(net) == members
    first, second = (sb.sample(net.eval(), tokens, draws=8) for _ in range(2))
    assert first.shape == (8, 8) and torch.isfinite(first).all()
    assert torch.equal(first, second) == (
        name in ("deterministic", "BatchEnsemble", "deep ensemble")
    )


def test_the_table_is_drawn_once_for_a_batch() -> None:
    """Bayesian embeddings, B.2: rows of a batch share the draw, draws differ."""
    net = sb.bayesianize(
        mortality_lstm(30, embedding=4, units=6, hidden=5),
        VARIANTS["Bayesian embeddings"],
    )
    logits = sb.sample(net, torch.randint(1, 30, (1, 5, 3)).expand(4, 5, 3), draws=3)
    torch.testing.assert_close(logits, logits[:, :1].expand(3, 4))
    assert len(logits[:, 0].unique()) == 3


@pytest.mark.parametrize(
    "config", [sb.MCDropout(rate=0.1), sb.KTied(rank=1), sb.ModelPatch(components=2)]
)
def test_other_methods_by_name(config: sb.Config) -> None:
    net = sb.bayesianize(
        mortality_lstm(30, embedding=4, units=6, hidden=5), {"hidden|output": config}
    )
    assert sb.sample(net, torch.randint(0, 30, (8, 5, 3)), draws=3).shape == (3, 8)


def crowded() -> Stays:
    """Two stays to train on and one each to validate and test, with 1, 2, 3 and 5 events."""
    who = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 2, 3, 5]))
    hours = torch.linspace(1, 40, 11, dtype=torch.float64)
    events = Events(who, hours, torch.zeros(11).long(), torch.arange(11.0), 4, ("HR",))
    splits = {
        "train": torch.tensor([0, 1]),
        "validation": torch.tensor([2]),
        "test": torch.tensor([3]),
    }
    return Stays(
        "toy", events, torch.tensor([0, 1, 0, 1]), torch.arange(4), splits, hours=40.0
    )


def test_all_splits_are_as_wide_as_the_fullest_bag() -> None:
    """Else a network's inputs would differ between training and test, and the lab refuses them."""
    stays = crowded()
    data = mortality(stays, precision=20.0)
    assert {
        name: tuple(rows.x.shape[1:]) for name, rows in data.splits.items()
    } == dict.fromkeys(stays.splits, (2, 5))
    alone = bag(
        stays.events.of(torch.tensor([2])),
        Buckets.fit(stays.events.of(torch.tensor([0, 1])), 40.0),
        40.0,
        20.0,
    )
    assert torch.equal(data.splits["validation"].x[..., : alone.shape[2]], alone)
    assert not data.splits["validation"].x[..., alone.shape[2] :].any()


def test_stays_know_when_they_are_asked() -> None:
    assert mortality(crowded(), precision=10.0).train.x.shape[1] == 4, (
        "40 hours, not 48"
    )


@real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deterministic", "rank-1 Gaussian"])
def test_training_on_real_stays(name: str, stays: Stays) -> None:
    few = Stays(
        "few",
        stays.events.of(torch.arange(500)),
        stays.labels[:500],
        stays.records[:500],
        {"train": torch.arange(500)},
    )
    data = mortality(few, precision=8.0, tokens_per_bag=24)
    net = sb.bayesianize(
        mortality_lstm(len(data.vocabulary), embedding=8, units=16, hidden=16),
        VARIANTS[name],
    )
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=1e-2), []
    for _ in range(25):
        optimizer.zero_grad()
        terms = sb.elbo(
            sb.bernoulli(sb.sample(net, data.train.x), data.train.y.float()),
            net,
            num_data=500,
            kl_weight=1e-3,
        )
        terms.loss.backward()
        optimizer.step()
        losses.append(float(terms.nll.detach()))
    share = float(data.train.y.float().mean())
    constant = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert losses[-1] < losses[0] and losses[-1] < 1.02 * constant, (
        losses[0],
        losses[-1],
        constant,
    )
