"""Tables of measurements both ways, by duckdb and line by line, and MIMIC-IV: equal events, equal errors, nothing after the prediction time."""

import gzip
import math
import random
import sys
import zlib
from pathlib import Path

import pytest
import torch
from test_health import join, named, write_mimic

from slimbayes.data import load, measurements, quick_tables
from slimbayes.data.health import Buckets, Events, Stays, bag, mortality
from slimbayes.data.mimic import mimic3, mimic4

duckdb = pytest.importorskip("duckdb", reason="NOT TESTED: duckdb is not installed")


@pytest.fixture(params=["duckdb", "line by line"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "line by line":
        monkeypatch.setattr(measurements, "quick_reader", lambda: None)
    return request.param


@pytest.fixture
def only_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_add_lines", lambda *a: pytest.fail("the plain reader was asked"))


def write(folder: Path, tables: dict[str, str], packed: bool = False) -> Path:
    for name, text in tables.items():
        file = folder / f"{name}.csv{'.gz' if packed else ''}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return folder


# MIMIC-IV ---------------------------------------------------------------------------------------------------------------

# The true column names of version 2.2. Patient 10 comes twice and dies the second time, 11 leaves on the first day, 12 has no measurements.
FOUR = {
    "hosp/patients": "subject_id,gender,anchor_age,anchor_year,anchor_year_group,dod\n10,F,52,2180,2014 - 2016,2180-07-01\n11,M,19,2150,2008 - 2010,\n12,M,91,2160,2008 - 2010,\n13,M,30,2160,2008 - 2010,\n",
    "hosp/admissions": """subject_id,hadm_id,admittime,dischtime,deathtime,admission_type,admit_provider_id,admission_location,discharge_location,insurance,language,marital_status,race,edregtime,edouttime,hospital_expire_flag
10,2001,2180-05-06 22:00:00,2180-05-09 17:00:00,,URGENT,P1,"TRANSFER, OTHER",HOME,Other,ENGLISH,WIDOWED,WHITE,2180-05-06 19:17:00,2180-05-06 23:30:00,0
10,2002,2181-06-20 10:00:00,2181-07-01 08:00:00,2181-07-01 08:00:00,EW EMER.,P2,EMERGENCY ROOM,DIED,Other,ENGLISH,WIDOWED,WHITE,,,1
11,2003,2150-01-01 00:00:00,2150-01-01 20:00:00,,URGENT,P1,X,HOME,Other,ENGLISH,,WHITE,,,0
12,2004,2165-01-01 00:00:00,2165-01-05 00:00:00,,URGENT,P1,X,HOME,Other,ENGLISH,,WHITE,,,0
""",
    "hosp/diagnoses_icd": "subject_id,hadm_id,seq_num,icd_code,icd_version\n10,2001,1,5723,9\n10,2002,1,K7460,10\n12,2004,1,5723,9\n",
    "hosp/procedures_icd": "subject_id,hadm_id,seq_num,chartdate,icd_code,icd_version\n10,2001,1,2180-05-07,5491,9\n",
    "hosp/prescriptions": """subject_id,hadm_id,pharmacy_id,poe_id,poe_seq,order_provider_id,starttime,stoptime,drug_type,drug,formulary_drug_cd,gsn,ndc,prod_strength,form_rx,dose_val_rx,dose_unit_rx,form_val_disp,form_unit_disp,doses_per_24_hrs,route
10,2002,1,,,P1,2181-06-20 15:00:00,2181-06-22 15:00:00,MAIN,Furosemide,F,,,,,40,mg,1,TAB,1,PO
10,2002,2,,,P1,2181-06-21 00:00:00,,MAIN,Insulin,F,,,,,1,u,1,V,1,SC
10,2002,3,,,P1,,,MAIN,Never,F,,,,,1,u,1,V,1,SC
""",
    "hosp/d_labitems": "itemid,label,fluid,category\n50912,Creatinine,Blood,Chemistry\n50931,Glucose,Blood,Chemistry\n",
    "hosp/labevents": """labevent_id,subject_id,hadm_id,specimen_id,itemid,order_provider_id,charttime,storetime,value,valuenum,valueuom,ref_range_lower,ref_range_upper,flag,priority,comments
1,10,2002,9,50912,P1,2181-06-20 11:00:00,2181-06-20 13:30:00,1.5,1.5,mg/dL,0.4,1.1,abnormal,STAT,"a, ""quoted"" remark"
2,10,2002,9,50931,P1,2181-06-21 09:00:00,2181-06-21 10:00:00,___,95,mg/dL,70,100,,STAT,
3,10,2002,9,50931,P1,2181-06-21 09:30:00,2181-06-21 10:00:01,___,300,mg/dL,70,100,,STAT,stored a second too late
4,10,,9,50931,P1,2181-06-01 09:30:00,,___,101,mg/dL,70,100,,ROUTINE,
5,10,2002,9,51006,P1,2181-06-20 12:00:00,2181-06-20 12:10:00,neg,,,,,,,
6,11,2003,9,50912,P1,2150-01-01 01:00:00,2150-01-01 02:00:00,1,1,mg/dL,,,,,
7,10,2002,9,50912,P1,,,1,1,mg/dL,,,,,
""",
    "icu/icustays": "subject_id,hadm_id,stay_id,first_careunit,last_careunit,intime,outtime,los\n10,2002,31,Medical Intensive Care Unit (MICU),Surgical ICU,2181-06-20 12:00:00,2181-06-30 12:00:00,10.0\n",
    "icu/d_items": "itemid,label,abbreviation,linksto,category,unitname,param_type,lownormalvalue,highnormalvalue\n220045,Heart Rate,HR,chartevents,Routine Vital Signs,bpm,Numeric,,\n",
    "icu/chartevents": """subject_id,hadm_id,stay_id,caregiver_id,charttime,storetime,itemid,value,valuenum,valueuom,warning
10,2002,31,5,2181-06-20 14:00:00,2181-06-20 14:30:00,220045,94,94,bpm,0
10,2002,31,5,2181-06-21 11:00:00,2181-06-21 11:01:00,220045,140,140,bpm,0
""",
}  # fmt: skip


def hours(events: dict[str, list[tuple[float, float]]]) -> dict[str, list[float]]:
    return {name: [hour for hour, _ in found] for name, found in events.items()}


@pytest.mark.parametrize("packed", [False, True])
def test_mimic4_uses_what_was_known(way: str, packed: bool, tmp_path: Path) -> None:
    stays = mimic4(write(tmp_path, FOUR, packed), hours=24.0)
    assert (
        stays.name == "mimic4" and stays.records.tolist() == [2001, 2002, 2004] and stays.labels.tolist() == [0, 1, 0]
    )
    first, second, third = (named(stays.events, i) for i in range(3))
    assert first == {} and third == {}  # codes of their own stay come too late
    back = -(406 * 24 + 17.0)  # from the first discharge to the second admission
    assert hours(second) == {
        "diagnosis/9/5723": [back], "procedure/9/5491": [back], "drug/furosemide": [5.0], "care unit/medical intensive care unit (micu)": [2.0],
        "lab/50912 creatinine/mg/dl": [3.5], "lab/50931 glucose/mg/dl": [24.0, -(19 * 24 + 0.5)], "lab/51006/": [2.0 + 1 / 6],
        "chart/220045 heart rate/bpm": [4.5],
    }  # fmt: skip
    assert second["lab/50931 glucose/mg/dl"][0][1] == 95.0 and math.isnan(second["lab/51006/"][0][1])
    ages = stays.events.value[stays.events.feature == stays.events.features.index("age")]
    assert ages.tolist() == [52.0, 53.0, 90.0]
    later = named(mimic4(tmp_path, hours=48.0).events, 1)
    assert (
        later["drug/insulin"][0][0] == 38.0
        and len(later["lab/50931 glucose/mg/dl"]) == 3
        and len(later["chart/220045 heart rate/bpm"]) == 2
    )
    outcome = {"deathtime", "dischtime", "discharge_location", "dod", "los", "last_careunit", "surgical icu", "died"}
    assert not [name for name in stays.events.features if any(word in name.casefold() for word in outcome)]


@pytest.mark.parametrize("limit", [24.0, 48.0])
def test_nothing_after_the_prediction_time_enters(limit: float, way: str, tmp_path: Path) -> None:
    """Everything that is recorded later than the limit may change at will: the events stay the same, bit for bit."""
    before = mimic4(write(tmp_path / "a", FOUR), limit)
    hour = 10 + limit
    late = f"2181-06-{20 + int(hour // 24)} {int(hour % 24):02}:00:01"
    more = {
        "hosp/labevents": f"91,10,2002,9,50912,P1,2181-06-20 10:30:00,{late},9,9,mg/dL,,,,,\n",
        "icu/chartevents": f"10,2002,31,5,{late},{late},220045,9,9,bpm,0\n",
        "hosp/prescriptions": f"10,2002,4,,,P1,{late},,MAIN,Poison,F,,,,,1,u,1,V,1,SC\n",
        "icu/icustays": f"10,2002,32,Hospice,Hospice,{late},{late},1\n",
        "hosp/diagnoses_icd": "10,2002,2,I469,10\n",
    }
    after = mimic4(write(tmp_path / "b", {name: text + more.get(name, "") for name, text in FOUR.items()}), limit)
    assert before.events.features == after.events.features
    for column in ("patient", "hours", "feature", "value"):
        assert torch.equal(getattr(before.events, column).nan_to_num(-7), getattr(after.events, column).nan_to_num(-7))
    early = {name: text.replace(late, "2181-06-20 10:30:00") for name, text in more.items()}  # the test can fail
    assert (
        len(
            mimic4(
                write(tmp_path / "c", {name: text + early.get(name, "") for name, text in FOUR.items()}), limit
            ).events
        )
        == len(before.events) + 4
    )


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        ("hosp/admissions", "10,2002", "10,2001", "admissions.csv, line 3: admission '2001' .* is there twice"),
        ("hosp/admissions", ",1\n11", ",2\n11", "admissions.csv, line 3: .*hospital_expire_flag '2'"),
        ("hosp/patients", "11,M,19", "10,M,19", "patients.csv, line 3: patient '10' is there twice"),
        ("hosp/patients", "13,M,30", "13,M,nan", "patients.csv, line 5: 'nan' is not a finite number"),
        ("hosp/patients", "13,M,30", "13,M,", "patients.csv, line 5: anchor_age ''"),
        ("hosp/patients", "anchor_age", "age", "patients.csv, line 1: the columns anchor_age are missing"),
        (
            "hosp/diagnoses_icd",
            "12,2004",
            "12,2002",
            "diagnoses_icd.csv, line 4: .* no admission '2002' of patient '12'",
        ),
        ("icu/icustays", "2181-06-20 12", "2181-06-20 25", "icustays.csv, line 2: '2181-06-20 25:00:00' is not a time"),
        ("hosp/labevents", "___,300", "___,nan", "labevents.csv, line 4: 'nan' is not a finite number"),
        ("hosp/labevents", "___,300", "___,1e39", "labevents.csv, line 4: '1e39' is not a finite number"),
        ("hosp/labevents", "4,10,", "4,99,", "labevents.csv, line 5: the table of admissions has no patient '99'"),
        (
            "hosp/labevents",
            "2181-06-21 10:00:01",
            "2181-06-31 10:00:01",
            "labevents.csv, line 4: '2181-06-31 10:00:01' is not a time",
        ),
        ("hosp/labevents", "neg,,,,,,,", "neg,,,,,,", "labevents.csv, line 6: 15 cells, but there are 16"),
        ("hosp/labevents", "\n4,", "\n\n4,", "labevents.csv, line 5: 0 cells"),
        ("hosp/labevents", "storetime", "stored", "labevents.csv, line 1: the columns storetime are missing"),
        ("hosp/labevents", "stored a second too late", '"stored', "labevents.csv, after line .*: damaged or cut short"),
        ("icu/chartevents", "94,94", "94,x", "chartevents.csv, line 2: 'x' is not a finite number"),
    ],
)
def test_bad_rows_are_named_both_ways(table: str, old: str, new: str, message: str, way: str, tmp_path: Path) -> None:
    assert old in FOUR[table]
    with pytest.raises(ValueError, match=message):
        mimic4(write(tmp_path, FOUR | {table: FOUR[table].replace(old, new, 1)}))


def test_damaged_packing_is_named_both_ways(way: str, tmp_path: Path) -> None:
    write(tmp_path, FOUR, packed=True)
    file = tmp_path / "hosp" / "labevents.csv.gz"
    whole = file.read_bytes()
    crc = zlib.crc32(FOUR["hosp/labevents"].encode()).to_bytes(4, "little")
    assert whole[-8:-4] == crc
    for content in (whole[:-12], whole[: len(whole) // 2], whole[:-8] + bytes(4) + whole[-4:]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"labevents.csv.gz, after line .*damaged or cut short"):
            mimic4(tmp_path)
    for content, message in (
        (b"", "the columns .* are missing"),
        (b"PK\x03\x04", "damaged or cut short"),
        (gzip.compress(b"x" * (1 << 21)), "more than 1,048,576 characters"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"labevents.csv.gz.*{message}"):
            mimic4(tmp_path)


def test_registered_sets(tmp_path: Path) -> None:
    write(tmp_path / "mimic4", FOUR)
    write_mimic(make(tmp_path / "mimic3"))
    for name, count in (("mimic3", 3), ("mimic4", 3)):
        data = load(name, tmp_path)
        assert sum(len(split) for split in data.splits.values()) == count and data.train.x.shape[1] == 25
        assert data.classes == ("survived", "died") and data.vocabulary[0] == ""


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


# Both ways -------------------------------------------------------------------------------------------------------------


def random_tables(seed: int, rows: int = 400) -> dict[str, str]:
    """MIMIC-III tables with rows in any order, patients with several stays, odd but allowed cells, quotes and units in two cases."""
    draw = random.Random(seed)

    def stamp():
        return f"2100-0{draw.randint(1, 2)}-{draw.randint(1, 28):02} {draw.randint(0, 23):02}:{draw.randint(0, 59):02}:{draw.randint(0, 59):02}"

    admissions = (
        "SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME,DEATHTIME,ADMISSION_TYPE,ADMISSION_LOCATION,HOSPITAL_EXPIRE_FLAG\n"
    )
    admissions += "".join(f"{n % 7},{n},{stamp()},2100-03-01 00:00:00,,A,B,{n % 2}\n" for n in range(12))
    labs = "ROW_ID,SUBJECT_ID,HADM_ID,ITEMID,CHARTTIME,VALUE,VALUENUM,VALUEUOM,FLAG\n"
    cells = ("", "1", "-2.5", "1e3", ".5", "7.", "12345.678901", '"3"', "+4")
    units = ("mg/dL", "MG/DL", "", '"%"', '"a ""b"", c"', "µmol", "ẞ", "it's; DROP TABLE kept;--")
    for row in range(rows):
        labs += f"{row},{draw.randint(0, 6)},,{draw.randint(1, 5)},{draw.choice([stamp(), stamp(), stamp(), ''])},v,{draw.choice(cells)},{draw.choice(units)},\n"
    return {"ADMISSIONS": admissions, "PATIENTS": "SUBJECT_ID,GENDER,DOB\n", "LABEVENTS": labs}


def sequences(stays: Stays) -> list[list[tuple[float, str, float]]]:
    out: list[list[tuple[float, str, float]]] = [[] for _ in range(stays.events.patients)]
    e = stays.events
    for who, hour, feature, value in zip(
        e.patient.tolist(), e.hours.tolist(), e.feature.tolist(), e.value.nan_to_num(-7).tolist(), strict=True
    ):
        out[who].append((hour, e.features[feature], value))
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("packed", [False, True])
def test_both_ways_give_the_same_events(
    seed: int, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, random_tables(seed), packed)
    with monkeypatch.context() as patch:
        patch.setattr(measurements, "_add_lines", lambda *a: pytest.fail("the plain reader was asked"))
        patch.setattr(quick_tables, "PIECE", 37)
        quick = mimic3(tmp_path, 200.0)
    monkeypatch.setattr(measurements, "quick_reader", lambda: None)
    plain = mimic3(tmp_path, 200.0)
    assert quick.events.features == plain.events.features and len(plain.events) > 150
    for column in ("patient", "hours", "feature", "value"):  # in the file's order and to the last bit
        assert torch.equal(getattr(quick.events, column).nan_to_num(-7), getattr(plain.events, column).nan_to_num(-7))


ODD = {
    "a quoted line break": lambda t: t.replace(",v,", ',"v\nw",', 1),
    "a T in a time": lambda t: t.replace(" 1", "T1", 1),
    "an underscore": lambda t: t.replace(",v,1,", ",v,1_0,", 1),
    "Windows lines": lambda t: t.replace("\n", "\r\n"),
    "no last line end": lambda t: t[:-1],
    "spaces": lambda t: t.replace(",v,1,", ",v, 1 ,", 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_odd_but_allowed_files_are_read_by_either(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = random_tables(0)
    odd = ODD[kind](tables["LABEVENTS"])
    assert odd != tables["LABEVENTS"]
    (tmp_path / "LABEVENTS.csv").parent.mkdir(exist_ok=True)
    write(tmp_path, tables)
    (tmp_path / "LABEVENTS.csv").write_bytes(odd.encode())
    quick = mimic3(tmp_path, 200.0)
    monkeypatch.setattr(measurements, "quick_reader", lambda: None)
    assert sequences(quick) == sequences(mimic3(tmp_path, 200.0))


FAULTS = [
    "24:00:00",
    "2100-01-01",
    "2100-13-01 00:00:00",
    "NaN",
    "inf",
    "0x10",
    "1e400",
    "1,5",
    '"',
    "\x00",
    "\n",
    ",",
    "nobody",
    "\udcff",
]


@pytest.mark.parametrize("seed", range(30))
def test_both_ways_agree_on_broken_files(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault put anywhere: the same error to the letter, or, where it does no harm, the same events."""
    tables, draw = random_tables(seed, rows=40), random.Random(seed)
    at = draw.randrange(tables["LABEVENTS"].index("\n") + 1, len(tables["LABEVENTS"]))
    broken = tables["LABEVENTS"][:at] + draw.choice(FAULTS) + tables["LABEVENTS"][at + draw.randint(0, 3) :]
    write(tmp_path, tables)
    (tmp_path / "LABEVENTS.csv").write_bytes(broken.encode("utf8", "surrogateescape"))

    def result() -> object:
        try:
            return sequences(mimic3(tmp_path, 200.0))
        except ValueError as error:
            return str(error)

    quick = result()
    monkeypatch.setattr(measurements, "quick_reader", lambda: None)
    assert quick == result()


def test_text_that_is_not_utf8_in_a_column_that_is_not_used(way: str, tmp_path: Path) -> None:
    """duckdb skips such cells; the plain reader does not."""
    write(tmp_path, FOUR)
    head, *lines = FOUR["hosp/labevents"].encode().splitlines(keepends=True)
    odd = [line.replace(b"stored a second", b"stored \xff second") for line in lines]
    (tmp_path / "hosp" / "labevents.csv").write_bytes(
        head + b"".join(lines * 500 + odd)
    )  # far behind what reading the first line brings in
    with pytest.raises(ValueError, match=r"labevents.csv, after line .*'utf-8' codec can't decode byte 0xff"):
        mimic4(tmp_path)


def test_well_formed_files_go_the_quick_way(only_quick: None, tmp_path: Path) -> None:
    mimic4(str(write(tmp_path, FOUR)))


def test_without_duckdb_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert measurements.quick_reader() is None
    assert mimic4(write(tmp_path, FOUR)).records.tolist() == [2001, 2002, 2004]


@pytest.mark.parametrize("name", ["it's; DROP TABLE kept; --", "a[1]*", '"quoted"', "%s {} ?"])
def test_names_are_never_part_of_a_query(name: str, tmp_path: Path) -> None:
    """Folders, columns and items may be called anything."""
    tables = {t: text.replace("comments", '"x""; DROP TABLE stays; --"') for t, text in FOUR.items()}
    tables["hosp/labevents"] = tables["hosp/labevents"].replace("50912", "5'; DROP TABLE kept; --")
    stays = mimic4(write(tmp_path / name, tables))
    assert "lab/5'; DROP TABLE kept; --/mg/dl" in stays.events.features and len(stays.labels) == 3


def test_duckdb_cannot_reach_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads no extension, keeps its scratch in a folder of its own, and leaves nothing behind."""
    seen = {}

    class Watched:
        Error = duckdb.Error

        @staticmethod
        def connect(path: str, config: dict[str, object]) -> object:
            seen.update(config, path=path)
            return duckdb.connect(path, config=config)

    monkeypatch.setattr(measurements, "quick_reader", lambda: Watched)
    mimic4(write(tmp_path, FOUR))
    assert seen["autoinstall_known_extensions"] is False and seen["autoload_known_extensions"] is False
    assert str(seen["path"]).startswith(str(seen["temp_directory"])) and not Path(str(seen["temp_directory"])).exists()


def test_patients_are_in_one_split(tmp_path: Path) -> None:
    head, *_ = FOUR["hosp/admissions"].splitlines()
    lines = [
        f"{n % 40},{n},2180-05-{1 + n // 40:02} 00:00:00,2180-05-30 00:00:00,,A,P,B,H,O,E,W,W,,,{n % 2}"
        for n in range(120)
    ]
    stays = mimic4(
        write(tmp_path, {"hosp/admissions": "\n".join([head, *lines]) + "\n", "hosp/patients": FOUR["hosp/patients"]})
    )
    owners = [{r % 40 for r in stays.records[rows].tolist()} for rows in stays.splits.values()]
    assert [len(o) for o in owners] == [32, 4, 4] and len(set.union(*owners)) == 40


def test_bags_of_tables_hold_no_later_event(tmp_path: Path) -> None:
    """The same once more through `mortality`: late events added to the Stays themselves change no token."""
    stays = mimic4(write(tmp_path, FOUR))
    events = stays.events
    late = Events(
        events.patient,
        torch.full_like(events.hours, 24 + 1 / 3600),
        events.feature,
        events.value + 1,
        events.patients,
        events.features,
    )
    whole = Stays(stays.name, join(events, late), stays.labels, stays.records, stays.splits)
    a, b = (mortality(s, 24.0, 6.0, aggregate_older_than=24.0) for s in (stays, whole))
    assert all(torch.equal(a.splits[name].x, b.splits[name].x) for name in a.splits)
    assert int((bag(events, Buckets.fit(events, 24.0), 24.0) != 0).sum()) == len(events)
