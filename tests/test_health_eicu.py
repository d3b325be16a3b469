"""eICU: rows and outcomes of small tables, the hospital shift, what is left out because it is known too late, broken tables, the real demo."""

import csv
import gzip
import math
import os
from pathlib import Path

import pytest
import torch

from slimbayes.data import IcuTable, eicu, hospital_split, load
from slimbayes.data.icu_tables import FEATURES, VARIABLES, standardised

REAL = Path(os.environ.get("SLIMBAYES_DATA", Path(__file__).parents[2] / "shared" / "data"))
DEMO = REAL / "eicu_demo"
APS = "apacheapsvarid,patientunitstayid," + ",".join(VARIABLES) + "\n"
RESULT = "apachepatientresultsid,patientunitstayid,acutephysiologyscore,apachescore,apacheversion,predictedhospitalmortality,actualhospitalmortality,actualhospitallos\n"
PATIENT = "patientunitstayid,gender,age,hospitalid,hospitaldischargeoffset,hospitaldischargestatus,unitdischargeoffset,uniquepid\n"


def aps(stay: int, **change: object) -> str:
    values = {name: i + 0.5 for i, name in enumerate(VARIABLES)} | change
    return f"{stay},{stay}," + ",".join(str(values[name]) for name in VARIABLES) + "\n"


def tables() -> dict[str, str]:
    """Stay 2 ends before 24 hours, 3 has no outcome, 4 no physiology; 5 is of the oldest."""
    return {
        "apacheApsVar": APS + aps(1, ph=-1, urine="") + aps(2) + aps(3) + aps(5, wbc=-1),
        "apachePatientResult": RESULT
        + "".join(
            f"{n},{n},40,50,{v},0.1,{o},2\n"
            for n, o in ((1, "ALIVE"), (2, "EXPIRED"), (4, "ALIVE"), (5, "EXPIRED"))
            for v in ("IV", "IVa")
        ),
        "patient": PATIENT
        + '1,Female,60,73,1440,Alive,1000,"002-1"\n2,Male,70,73,1439,Expired,1000,002-2\n3,Male,71,73,5000,Alive,1000,002-3\n4,Male,71,73,5000,Alive,1,002-4\n5,Unknown,> 89,80,9000,Expired,800,002-1\n',
    }


def write(folder: Path, **change: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, (name, text) in enumerate((tables() | change).items()):
        (folder / f"{name}.csv{'.gz' if i % 2 else ''}").write_bytes(
            gzip.compress(text.encode()) if i % 2 else text.encode()
        )
    return folder


def test_rows_and_outcomes(tmp_path: Path) -> None:
    stays = eicu(write(tmp_path))
    assert (
        stays.stay.tolist() == [1, 5]
        and stays.y.tolist() == [0, 1]
        and stays.hospital.tolist() == [73, 80]
        and stays.patient.tolist() == [0, 0]
    )
    assert stays.x.shape == (2, 26) and stays.features == FEATURES
    missing = {(FEATURES[c], r) for r, c in stays.x.isnan().nonzero().tolist()}
    assert missing == {("ph", 0), ("urine", 0), ("wbc", 1), ("male", 1)}
    assert (
        stays.x[0, :3].tolist() == [0.5, 1.5, 2.5] and stays.x[:, -2].tolist() == [60.0, 90.0] and stays.x[0, -1] == 0
    )
    assert eicu(tmp_path, hours=0.0).stay.tolist() == [1, 2, 5] and eicu(tmp_path, hours=100.0).stay.tolist() == [5]


def test_nothing_known_later_is_an_input(tmp_path: Path) -> None:
    """Outcome, scores, lengths of stay and times of discharge may change at will, as long as a stay remains in hospital for a day."""
    before = eicu(write(tmp_path / "a"))
    changed = tables()
    changed["apachePatientResult"] = (
        changed["apachePatientResult"].replace("40,50", "140,250").replace("0.1,ALIVE,2", "0.9,EXPIRED,99")
    )
    changed["patient"] = changed["patient"].replace("1440,Alive,1000", "99999,Expired,77777")
    after = eicu(write(tmp_path / "b", **changed))
    assert torch.equal(before.x.nan_to_num(-9), after.x.nan_to_num(-9)) and after.y.tolist() == [1, 1]
    assert not set(FEATURES) & {
        "diedinhospital",
        "predictedhospitalmortality",
        "actualhospitallos",
        "apachescore",
        "hospitaldischargeoffset",
    }


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        ("apacheApsVar", "\n2,2,", "\n2,1,", "apacheApsVar.csv, line 3: stay '1' is there twice"),
        ("apacheApsVar", "\n2,2,", "\n2,9,", "apacheApsVar.csv, line 3: stay '9' is not in the table patient"),
        ("apacheApsVar", "\n2,2,0.5", "\n2,2,nan", "apacheApsVar.csv, line 3: 'nan' is not a finite number"),
        ("apacheApsVar", "\n2,2,0.5", "\n2,2,high", "apacheApsVar.csv, line 3: 'high' is not a finite number"),
        ("apacheApsVar", "\n2,2,0.5", "\n2,2", "apacheApsVar.csv, line 3: 25 cells, but there are 26"),
        ("apacheApsVar", "hematocrit", "hct", "apacheApsVar.csv, line 1: the columns hematocrit are missing"),
        (
            "apachePatientResult",
            "0.1,EXPIRED",
            "0.1,2",
            "apachePatientResult.csv.gz, line 4: actualhospitalmortality '2' is not one of ALIVE, EXPIRED",
        ),
        (
            "apachePatientResult",
            "0.1,EXPIRED",
            "0.1,",
            "apachePatientResult.csv.gz, line 4: actualhospitalmortality ''",
        ),
        (
            "apachePatientResult",
            "2,2,40,50,IVa",
            "2,1,40,50,IVa",
            "apachePatientResult.csv.gz, line 5: stay '1' is there twice in version IVa",
        ),
        ("patient", "\n2,Male", "\n1,Male", "patient.csv, line 3: stay '1' .* is there twice"),
        ("patient", "70,73", "70,x", "patient.csv, line 3: stay '2' .* needs a number"),
        ("patient", "73,1439", "73,", "patient.csv, line 3: stay '2' has no hospitaldischargeoffset"),
        ("patient", "Male,70", "Male,old", "patient.csv, line 3: 'old' is not a finite number"),
    ],
)
def test_bad_rows_are_named(table: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    text = tables()[table]
    assert old in text
    with pytest.raises(ValueError, match=message):
        eicu(write(tmp_path, **{table: text.replace(old, new, 1)}))


def test_damaged_or_missing_tables_are_named(tmp_path: Path) -> None:
    file = write(tmp_path) / "apachePatientResult.csv.gz"
    whole = file.read_bytes()
    for content in (whole[:-9], b"PK\x03\x04", whole[:-8] + bytes(8)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"apachePatientResult.csv.gz, after line .*damaged or cut short"):
            eicu(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no apachePatientResult.csv"):
        eicu(tmp_path)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        eicu(tmp_path, hours=-1.0)


# The shift -------------------------------------------------------------------------------------------------------------


def random_stays(count: int = 600) -> IcuTable:
    x = torch.randn(count, 3).masked_fill(torch.rand(count, 3) < 0.3, math.nan)
    return IcuTable(
        x,
        torch.randint(0, 2, (count,)),
        torch.arange(count),
        torch.randint(0, 400, (count,)),
        torch.randint(0, 30, (count,)),
        ("a", "b", "c"),
    )


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_hospitals_and_patients_do_not_mix(share: float) -> None:
    stays = random_stays()
    rows = hospital_split(stays, share, seed=3)
    hospital, patient = (
        {name: set(values[index].tolist()) for name, index in rows.items()}
        for values in (stays.hospital, stays.patient)
    )
    assert len(hospital["shift"]) == round(share * 30) and not hospital["shift"] & (
        hospital["train"] | hospital["test"]
    )
    assert not patient["train"] & patient["test"] and not patient["shift"] & (patient["train"] | patient["test"])
    assert len(set(torch.cat(list(rows.values())).tolist())) == sum(map(len, rows.values()))
    left = set(range(600)) - set(torch.cat(list(rows.values())).tolist())
    assert all(
        int(stays.patient[i]) in patient["shift"] for i in left
    )  # only who was in both kinds of hospitals is left out
    again, other = hospital_split(stays, share, seed=3), hospital_split(stays, share, seed=4)
    assert all(torch.equal(rows[name], again[name]) for name in rows) and not torch.equal(rows["shift"], other["shift"])
    for wrong in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            hospital_split(stays, wrong)


def test_standardised_against_a_slow_loop() -> None:
    stays = random_stays()
    stays.x[:, 2] = 5.0  # constant
    rows = hospital_split(stays)
    data = standardised(stays, rows)
    for column in range(3):
        known = [float(stays.x[i, column]) for i in rows["train"].tolist() if not math.isnan(stays.x[i, column])]
        mean = sum(known) / len(known)
        spread = math.sqrt(sum((v - mean) ** 2 for v in known) / len(known)) or 1.0
        for name, index in rows.items():
            want = torch.tensor(
                [0.0 if math.isnan(v) else (v - mean) / spread for v in stays.x[index, column].tolist()]
            )
            torch.testing.assert_close(data.splits[name].x[:, column], want, atol=1e-5, rtol=1e-5)
            assert torch.equal(data.splits[name].x[:, 3 + column], (~stays.x[index, column].isnan()).float())
    elsewhere = IcuTable(
        stays.x.index_fill(0, rows["shift"], 100.0), stays.y, stays.stay, stays.patient, stays.hospital, stays.features
    )
    assert torch.equal(standardised(elsewhere, rows).train.x, data.train.x)  # the scale is the training rows' alone
    with pytest.raises(ValueError, match="needs a split 'train'"):
        standardised(stays, {"test": rows["test"]})


def test_load(tmp_path: Path) -> None:
    rows = range(100, 160)
    write(
        tmp_path / "eicu",
        apacheApsVar=APS + "".join(map(aps, rows)),
        apachePatientResult=RESULT
        + "".join(f"{n},{n},1,1,IVa,0.1,{'ALIVE' if n % 3 else 'EXPIRED'},1\n" for n in rows),
        patient=PATIENT + "".join(f"{n},Male,60,{n % 10},3000,Alive,1,p{n}\n" for n in rows),
    )
    data = load("eicu", tmp_path)
    assert (
        list(data.splits) == ["train", "test", "shift"]
        and sum(map(len, data.splits.values())) == 60
        and len(data.splits["shift"]) == 18
    )
    assert data.train.x.shape[1] == 52 and data.train.x.isfinite().all() and data.classes == ("survived", "died")


@pytest.mark.skipif(not DEMO.is_dir(), reason=f"NOT TESTED ON REAL DATA: {DEMO} is missing")
def test_the_demo() -> None:
    """1,838 stays with 24 h physiology and an outcome, 155 deaths (its README); a plain count with csv agrees."""
    assert (len(eicu(DEMO, 0.0)), int(eicu(DEMO, 0.0).y.sum())) == (1838, 155)

    def read(name: str) -> list[dict[str, str]]:
        with gzip.open(DEMO / f"{name}.csv.gz", "rt") as stream:
            return list(csv.DictReader(stream))

    ends = {r["patientunitstayid"]: int(r["hospitaldischargeoffset"]) for r in read("patient")}
    died = {
        r["patientunitstayid"]: r["actualhospitalmortality"] == "EXPIRED"
        for r in read("apachePatientResult")
        if r["apacheversion"] == "IVa"
    }
    want = {
        int(r["patientunitstayid"]): died[r["patientunitstayid"]]
        for r in read("apacheApsVar")
        if r["patientunitstayid"] in died and ends[r["patientunitstayid"]] >= 1440
    }
    stays = eicu(DEMO)
    assert dict(zip(stays.stay.tolist(), stays.y.bool().tolist(), strict=True)) == want and len(want) == 1669
    data = load("eicu-demo", REAL)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 946, "test": 236, "shift": 483}
    # Physiology predicts death in hospitals that were not seen: a linear score ranks better than chance.
    x, y = data.train.x.double(), data.train.y.double() * 2 - 1
    weights = torch.linalg.solve(x.T @ x + 50 * torch.eye(52), x.T @ y)
    score, dead = data.splits["shift"].x.double() @ weights, data.splits["shift"].y.bool()
    assert (score[dead][:, None] > score[~dead]).double().mean() > 0.7
