"""MIMIC-III: against a slow loop, errors that name the line, nothing after the prediction time."""

import csv
import gzip
import io
import math
import random
import zlib
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import each
from slimbayes_lab.data import load
from slimbayes_lab.data.events import Buckets, Events, bag
from slimbayes_lab.data.mimic import mimic3
from slimbayes_lab.data.stays import Stays, mortality
from test_health import REAL, join


def write(folder: Path, tables: dict[str, str], packed: bool = False) -> Path:
    for name, text in tables.items():
        file = folder / f"{name}.csv{'.gz' if packed else ''}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return folder


# Patient 7 is admitted twice, patient 8 dies on the first day, patient 9 has no history. Full-set capitals in one
# table, demo's in others.
TABLES = {
    "ADMISSIONS": """"ROW_ID","SUBJECT_ID","HADM_ID","ADMITTIME","DISCHTIME","DEATHTIME","ADMISSION_TYPE",\
"ADMISSION_LOCATION","HOSPITAL_EXPIRE_FLAG"
1,7,100,2100-01-01 00:00:00,2100-01-05 00:00:00,,EMERGENCY,"CLINIC, REFERRAL",0
2,7,101,2100-02-01 10:00:00,2100-02-09 00:00:00,2100-02-09 00:00:00,URGENT,X,1
3,8,102,2100-01-01 00:00:00,2100-01-05 00:00:00,2100-01-01 20:00:00,URGENT,X,1
4,9,103,2100-01-01 00:00:00,2100-01-03 00:00:00,,URGENT,X,0
""",
    "PATIENTS": """row_id,subject_id,gender,dob,dod
1,7,F,2060-01-01 00:00:00,2100-02-09 00:00:00
2,8,M,2060-01-01 00:00:00,
3,9,M,1800-01-01 00:00:00,
""",
    "DIAGNOSES_ICD": "row_id,subject_id,hadm_id,seq_num,icd9_code\n1,7,100,1,4019\n2,7,101,1,99591\n3,9,103,1,4019\n"
    "4,7,100,2,\n",
    "PRESCRIPTIONS": """row_id,subject_id,hadm_id,startdate,drug
1,7,101,2100-02-01 00:00:00,Insulin
2,7,101,2100-02-02 00:00:00,Heparin
3,9,103,,Heparin
""",
    "LABEVENTS": """row_id,subject_id,hadm_id,itemid,charttime,value,valuenum,valueuom,flag
1,7,101,50912,2100-02-02 10:00:00,1.5,1.5,mg/dL,
2,7,101,50912,2100-02-02 10:00:01,9.5,9.5,mg/dL,
3,9,,50912,2099-12-31 12:00:00,low,,mg/dL,
""",
    "PROCEDURES_ICD": "row_id,subject_id,hadm_id,seq_num,icd9_code\n1,7,100,1,5491\n",
    "D_ITEMS": "row_id,itemid,label\n1,220045,Heart Rate\n",
    "CHARTEVENTS": """row_id,subject_id,hadm_id,icustay_id,itemid,charttime,storetime,value,valuenum,valueuom
1,7,101,31,220045,2100-02-01 14:30:00,,94,94,bpm
2,7,101,31,220045,2100-02-02 11:00:00,,140,140,bpm
3,7,101,31,220045,,,150,150,bpm
""",
    "ICUSTAYS": """row_id,subject_id,hadm_id,icustay_id,first_careunit,last_careunit,intime,outtime,los
1,7,101,31,MICU,SICU,2100-02-01 12:00:00,2100-02-08 12:00:00,7.0
""",
}


def write_mimic(folder: Path, **change: str) -> Path:
    for i, (name, text) in enumerate((TABLES | change).items()):
        packed = i % 2 == 0
        (folder / f"{name}.csv{'.gz' if packed else ''}").write_bytes(
            gzip.compress(text.encode()) if packed else text.encode()
        )
    return folder


def named(events: Events, patient: int) -> dict[str, list[tuple[float, float]]]:
    out: dict[str, list[tuple[float, float]]] = {}
    for who, hour, feature, value in zip(
        *(
            getattr(events, n).tolist()
            for n in ("patient", "hours", "feature", "value")
        ),
        strict=True,
    ):
        if who == patient and hour:
            out.setdefault(events.features[feature], []).append((hour, value))
    return out


def test_mimic_uses_what_was_known(tmp_path: Path) -> None:
    stays = mimic3(write_mimic(tmp_path), hours=24.0)
    assert stays.records.tolist() == [100, 101, 103] and stays.labels.tolist() == [
        0,
        1,
        0,
    ]  # 102 ended before the prediction time
    first, second, third = (named(stays.events, i) for i in range(3))
    assert first == {}  # its own codes come too late
    known = {
        "diagnosis/4019": -27 * 24 - 10.0,
        "procedure/5491": -27 * 24 - 10.0,
        "care unit/micu": 2.0,
        "chart/220045 heart rate/bpm": 4.5,
        "drug/insulin": 14.0,
        "lab/50912/mg/dl": 24.0,
    }
    assert {name: [hour for hour, _ in events] for name, events in second.items()} == {
        name: [hour] for name, hour in known.items()
    }
    assert second["lab/50912/mg/dl"] == [(24.0, 1.5)]
    assert list(third) == ["lab/50912/mg/dl"] and math.isnan(
        third["lab/50912/mg/dl"][0][1]
    )
    ages = stays.events.value[
        stays.events.feature == stays.events.features.index("age")
    ]
    torch.testing.assert_close(
        ages, torch.tensor([40.0, 40.08, 90.0]), atol=0.01, rtol=0
    )
    assert "admission_location=CLINIC, REFERRAL" in stays.events.features
    outcome = {"deathtime", "dischtime", "dod", "los", "last_careunit", "sicu", "died"}
    assert not [
        name
        for name in stays.events.features
        if any(word in name.casefold() for word in outcome)
    ]
    later = named(mimic3(tmp_path, hours=47.0).events, 1)
    assert later["drug/heparin"] == [(38.0, pytest.approx(math.nan, nan_ok=True))]
    assert later["drug/insulin"][0][0] == 14.0 and len(later["lab/50912/mg/dl"]) == 2


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        (
            "ADMISSIONS",
            "3,8,102",
            "3,8,101",
            "ADMISSIONS.csv.gz, line 4: admission '101' .* is there twice",
        ),
        (
            "ADMISSIONS",
            "X,1\n3",
            "X,2\n3",
            "line 3: admission '101' with hospital_expire_flag '2'",
        ),
        (
            "ADMISSIONS",
            "2100-02-01 10",
            "2100-02-31 10",
            "line 3: '2100-02-31 10:00:00' is not a time",
        ),
        (
            "ADMISSIONS",
            '"DEATHTIME"',
            '"DIED"',
            "line 1: the columns deathtime are missing",
        ),
        ("ADMISSIONS", "URGENT,X,1", "URGENT,1", "line 3: 8 cells, but there are 9"),
        (
            "PATIENTS",
            "2,8,M",
            "2,7,M",
            "PATIENTS.csv, line 3: patient '7' is there twice",
        ),
        (
            "PATIENTS",
            "2060-01-01 00:00:00",
            "2060-01-01",
            "PATIENTS.csv, line 2: '2060-01-01' is not a time",
        ),
        (
            "DIAGNOSES_ICD",
            "9,103",
            "9,104",
            "DIAGNOSES_ICD.csv.gz, line 4: the table of admissions has no admission '104' of patient '9'",
        ),
        (
            "PRESCRIPTIONS",
            "2,7,101",
            "2,6,101",
            "PRESCRIPTIONS.csv, line 3: the table of admissions has no patient '6'",
        ),
        (
            "LABEVENTS",
            "9.5,9.5",
            "9.5,inf",
            "LABEVENTS.csv.gz, line 3: 'inf' is not a finite number",
        ),
        (
            "LABEVENTS",
            "9.5,9.5",
            "9.5,1e39",
            "LABEVENTS.csv.gz, line 3: '1e39' is not a finite number",
        ),
        ("LABEVENTS", "\n3,", "\n\n3,", "LABEVENTS.csv.gz, line 4: 0 cells"),
        (
            "CHARTEVENTS",
            "94,94",
            "94,x",
            "CHARTEVENTS.csv, line 2: 'x' is not a finite number",
        ),
        (
            "ICUSTAYS",
            "2100-02-01 12",
            "2100-02-01 25",
            "ICUSTAYS.csv.gz, line 2: '2100-02-01 25:00:00' is not a time",
        ),
        (
            "LABEVENTS",
            "low,,",
            'low,"',
            "LABEVENTS.csv.gz, line 4: damaged or cut short",
        ),
    ],
)
def test_mimic_bad_rows_are_named(
    table: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in TABLES[table]
    with pytest.raises(ValueError, match=message):
        mimic3(write_mimic(tmp_path, **{table: TABLES[table].replace(old, new, 1)}))


def test_damaged_packing_is_named(tmp_path: Path) -> None:
    file = write_mimic(tmp_path) / "LABEVENTS.csv.gz"
    whole = file.read_bytes()
    crc = zlib.crc32(TABLES["LABEVENTS"].encode()).to_bytes(4, "little")
    assert whole[-8:-4] == crc
    for content, message in (
        (whole[:-12], "damaged or cut short"),
        (whole[: len(whole) // 2], "damaged or cut short"),
        (whole[:-8] + bytes(4) + whole[-4:], "damaged or cut short"),
        (b"", "the columns .* are missing"),
        (b"PK\x03\x04", "damaged or cut short"),
        (gzip.compress(b"x" * (1 << 21)), "a line has more than 1,048,576 characters"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"LABEVENTS.csv.gz, line .*{message}"):
            mimic3(tmp_path)


def test_a_needed_table_that_is_missing_is_named(tmp_path: Path) -> None:
    (write_mimic(tmp_path) / "PATIENTS.csv").unlink()
    with pytest.raises(FileNotFoundError, match="no PATIENTS.csv"):
        mimic3(tmp_path)


DEMO = REAL / "mimic3_demo"


@pytest.mark.skipif(
    not DEMO.is_dir(), reason=f"NOT TESTED ON REAL DATA: {DEMO} is missing"
)
@pytest.mark.parametrize(
    ("hours", "count", "deaths"), [(24.0, 118, 31), (48.0, 115, 29)]
)
def test_the_mimic_demo(hours: float, count: int, deaths: int) -> None:
    """129 admissions with 40 deaths, less those that end too early; patients are in one split each."""
    stays = mimic3(DEMO, hours)
    assert (len(stays.labels), int(stays.labels.sum())) == (count, deaths)
    assert float(stays.events.hours.max()) <= hours
    with gzip.open(DEMO / "ADMISSIONS.csv.gz", "rt") as file:
        subject = {
            int(line.split(",")[2]): line.split(",")[1] for line in list(file)[1:]
        }
    owners = [
        {subject[r] for r in stays.records[rows].tolist()}
        for rows in stays.splits.values()
    ]
    assert len(subject) == 129 and sum(map(len, owners)) == len(set.union(*owners))
    data = mortality(
        stays, hours, precision=24.0, aggregate_older_than=hours, tokens_per_bag=64
    )
    assert data.train.x.shape[1:] == (1 + hours / 24, 64)
    assert sum(len(rows) for rows in stays.splits.values()) == count


@pytest.mark.parametrize("limit", [24.0, 48.0])
def test_nothing_after_the_prediction_time_enters(limit: float, tmp_path: Path) -> None:
    """Everything that is recorded later than the limit may change at will: the events stay the same, bit for bit."""
    before = mimic3(write(tmp_path / "a", TABLES), limit)
    hour = 10 + limit
    late = f"2100-02-{1 + int(hour // 24):02} {int(hour % 24):02}:00:01"
    more = {
        "LABEVENTS": f"91,7,101,50912,{late},9,9,mg/dL,\n",
        "CHARTEVENTS": f"91,7,101,31,220045,{late},,9,9,bpm\n",
        "PRESCRIPTIONS": f"91,7,101,{late},Poison\n",
        "ICUSTAYS": f"91,7,101,32,Hospice,Hospice,{late},{late},1\n",
        "DIAGNOSES_ICD": "91,7,101,2,I469\n",
    }
    after = mimic3(
        write(
            tmp_path / "b",
            {name: text + more.get(name, "") for name, text in TABLES.items()},
        ),
        limit,
    )
    assert before.events.features == after.events.features
    for column in ("patient", "hours", "feature", "value"):
        assert torch.equal(
            getattr(before.events, column).nan_to_num(-7),
            getattr(after.events, column).nan_to_num(-7),
        )
    early = {
        name: text + more.get(name, "").replace(late, "2100-02-01 10:30:00")
        for name, text in TABLES.items()
    }
    seen = mimic3(write(tmp_path / "c", early), limit)
    assert len(seen.events) == len(before.events) + 4  # all but the code


@pytest.mark.parametrize("name", ["mimic3", "mimic3-demo"])
def test_registered_sets(name: str, tmp_path: Path) -> None:
    write_mimic(make(tmp_path / name.replace("-", "_")))
    data = load(name, tmp_path)
    assert sum(len(split) for split in data.splits.values()) == 3
    assert data.train.x.shape[1] == 25
    assert data.classes == ("survived", "died") and data.vocabulary[0] == ""


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


# Against a slow loop ------------------------------------------------------------------------------------------------


def random_tables(seed: int, rows: int = 400) -> dict[str, str]:
    """MIMIC-III tables with rows in any order, patients with several stays, odd but allowed cells, quotes, units in two
    cases."""
    draw = random.Random(seed)

    def stamp() -> str:
        day, hour = (
            f"2100-0{draw.randint(1, 2)}-{draw.randint(1, 28):02}",
            f"{draw.randint(0, 23):02}",
        )
        return f"{day} {hour}:{draw.randint(0, 59):02}:{draw.randint(0, 59):02}"

    columns = "SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME,DEATHTIME,ADMISSION_TYPE,ADMISSION_LOCATION,HOSPITAL_EXPIRE_FLAG"
    lines = [
        f"{n % 7},{n},{stamp()},2100-03-01 00:00:00,,A,B,{n % 2}" for n in range(12)
    ]
    labs = "ROW_ID,SUBJECT_ID,HADM_ID,ITEMID,CHARTTIME,VALUE,VALUENUM,VALUEUOM,FLAG\n"
    cells = ("", "1", "-2.5", "1e3", ".5", "7.", "12345.678901", '"3"', "+4")
    units = ("mg/dL", "MG/DL", "", '"%"', '"a ""b"", c"', "µmol", "ẞ", "it's")
    for row in range(rows):
        taken = draw.choice([stamp(), stamp(), stamp(), ""])
        labs += f"{row},{draw.randint(0, 6)},,{draw.randint(1, 5)},{taken},v,{draw.choice(cells)},{draw.choice(units)},\n"
    admissions = "\n".join([columns, *lines]) + "\n"
    return {
        "ADMISSIONS": admissions,
        "PATIENTS": "SUBJECT_ID,GENDER,DOB\n",
        "LABEVENTS": labs,
    }


def slow_events(
    tables: dict[str, str], limit: float
) -> list[list[tuple[float, str, float]]]:
    """What each admission knows of its labs, by comparing every admission with every line of the table."""
    table = {
        name: list(csv.DictReader(io.StringIO(text, newline="")))
        for name, text in tables.items()
    }
    out = []
    for stay in table["ADMISSIONS"]:
        start, known = datetime.fromisoformat(stay["ADMITTIME"]), []
        if (
            datetime.fromisoformat(stay["DISCHTIME"]) - start
        ).total_seconds() <= 3600 * limit:
            continue
        for lab in table["LABEVENTS"]:
            if lab["SUBJECT_ID"] == stay["SUBJECT_ID"] and lab["CHARTTIME"]:
                hour = (
                    datetime.fromisoformat(lab["CHARTTIME"]) - start
                ).total_seconds() / 3600
                value = np.float32(lab["VALUENUM"]) if lab["VALUENUM"] else -7.0
                if hour <= limit:
                    known.append(
                        (
                            hour,
                            f"lab/{lab['ITEMID']}/{lab['VALUEUOM'].casefold()}",
                            float(value),
                        )
                    )
        out.append(known)
    return out


def lab_events(stays: Stays) -> list[list[tuple[float, str, float]]]:
    out: list[list[tuple[float, str, float]]] = [
        [] for _ in range(stays.events.patients)
    ]
    e = stays.events
    columns = (
        e.patient.tolist(),
        e.hours.tolist(),
        e.feature.tolist(),
        e.value.nan_to_num(-7).tolist(),
    )
    for who, hour, feature, value in zip(*columns, strict=True):
        if e.features[feature].startswith("lab/"):
            out[who].append((hour, e.features[feature], value))
    return out


@pytest.mark.parametrize(("seed", "packed"), each(range(3), [False, True]))
def test_events_equal_a_slow_loop(seed: int, packed: bool, tmp_path: Path) -> None:
    tables = random_tables(seed)
    stays = mimic3(write(tmp_path, tables, packed), 200.0)
    assert lab_events(stays) == slow_events(tables, 200.0) and len(stays.events) > 150


ODD = {
    "a quoted line break": lambda t: t.replace(",v,", ',"v\nw",', 1),
    "a T in a time": lambda t: t.replace(" 1", "T1", 1),
    "Windows lines": lambda t: t.replace("\n", "\r\n"),
    "no last line end": lambda t: t[:-1],
    "spaces": lambda t: t.replace(",v,1,", ",v, 1 ,", 1),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_but_allowed_files_are_read(kind: str, tmp_path: Path) -> None:
    tables = random_tables(0)
    odd = tables | {"LABEVENTS": ODD[kind](tables["LABEVENTS"])}
    assert odd != tables
    assert lab_events(mimic3(write(tmp_path, odd), 200.0)) == slow_events(tables, 200.0)


FAULTS = [
    "24:00:00",
    "2100-01-01",
    "2100-13-01 00:00:00",
    "NaN",
    "inf",
    "0x10",
    "1e400",
    "1_0",
    '"',
    "\n",
    ",",
    "\udcff",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_any_used_cell_is_named(fault: str, tmp_path: Path) -> None:
    head, *lines = random_tables(0, rows=40)["LABEVENTS"].splitlines()
    for column in (4, 6):  # the time and the number
        cells = lines[20].split(",", 7)
        cells[4], cells[6] = cells[4] or "2100-01-01 00:00:00", "1"
        cells[column] = fault
        broken = "\n".join([head, *lines[:20], ",".join(cells), *lines[21:]]) + "\n"
        write(tmp_path, random_tables(0, rows=40))
        (tmp_path / "LABEVENTS.csv").write_bytes(
            broken.encode("utf8", "surrogateescape")
        )
        with pytest.raises(ValueError, match=r"LABEVENTS.csv, line \d+: "):
            mimic3(tmp_path, 200.0)


def test_text_that_is_not_utf8_in_a_column_that_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, TABLES)
    head, *lines = TABLES["LABEVENTS"].encode().splitlines(keepends=True)
    odd = [line.replace(b"low", b"l\xffw") for line in lines]
    (tmp_path / "LABEVENTS.csv").write_bytes(
        head + b"".join(lines * 500 + odd)
    )  # far behind what reading the first line brings in
    with pytest.raises(
        ValueError, match=r"LABEVENTS.csv, line .*'utf-8' codec can't decode byte 0xff"
    ):
        mimic3(tmp_path)


def test_patients_are_in_one_split(tmp_path: Path) -> None:
    head = TABLES["ADMISSIONS"].partition("\n1,")[0]
    lines = [
        f"{n},{n % 40},{n},2100-05-{1 + n // 40:02} 00:00:00,2100-05-30 00:00:00,,A,B,{n % 2}"
        for n in range(120)
    ]
    tables = {
        "ADMISSIONS": "\n".join([head, *lines]) + "\n",
        "PATIENTS": TABLES["PATIENTS"],
    }
    stays = mimic3(write(tmp_path, tables))
    owners = [
        {r % 40 for r in stays.records[rows].tolist()} for rows in stays.splits.values()
    ]
    assert [len(o) for o in owners] == [32, 4, 4] and len(set.union(*owners)) == 40


def test_bags_of_tables_hold_no_later_event(tmp_path: Path) -> None:
    """The same once more through `mortality`: late events added to the Stays themselves change no token."""
    stays = mimic3(write(tmp_path, TABLES))
    events = stays.events
    late = Events(
        events.patient,
        torch.full_like(events.hours, 24 + 1 / 3600),
        events.feature,
        events.value + 1,
        events.patients,
        events.features,
    )
    whole = Stays(
        stays.name, join(events, late), stays.labels, stays.records, stays.splits
    )
    a, b = (mortality(s, 24.0, 6.0, aggregate_older_than=24.0) for s in (stays, whole))
    assert all(torch.equal(a.splits[name].x, b.splits[name].x) for name in a.splits)
    assert int((bag(events, Buckets.fit(events, 24.0), 24.0) != 0).sum()) == len(events)
