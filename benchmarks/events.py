"""Processor seconds and peak memory of reading a table of events.

    python benchmarks/events.py [--rows 1000000] [--gz] [--out FILE]

Writes MIMIC-III's ADMISSIONS, PATIENTS and a LABEVENTS of that many rows to a temporary folder, all of them within the
first day of some admission, so that every row becomes an event: the worst case for time and memory. Each measurement
runs in a process of its own; its peak is the process's, with torch and all else that is loaded. "baseline" is a
process that reads the same admissions without events.
"""

import argparse
import gzip
import hashlib
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

STAYS = 20_000
ITEMS = [(50_800 + i, ("mg/dL", "mEq/L", "K/uL", "%")[i % 4]) for i in range(300)]
WAYS = ("baseline", "events")


def write_tables(folder: Path, rows: int, packed: bool) -> Path:
    """The three tables; returns the large one."""
    first = datetime(2100, 1, 1)
    starts = [first + timedelta(hours=6 * i) for i in range(STAYS)]
    with (folder / "ADMISSIONS.csv").open("w") as stream:
        stream.write(
            "ROW_ID,SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME,DEATHTIME,ADMISSION_TYPE,ADMISSION_LOCATION,"
        )
        stream.write("HOSPITAL_EXPIRE_FLAG\n")
        stream.writelines(
            f"{i},{i},{100_000 + i},{s},{s + timedelta(days=5)},,EMERGENCY,CLINIC,{i % 9 == 0:d}\n"
            for i, s in enumerate(starts)
        )
    with (folder / "PATIENTS.csv").open("w") as stream:
        stream.write("ROW_ID,SUBJECT_ID,GENDER,DOB,DOD\n")
        stream.writelines(
            f"{i},{i},{'FM'[i % 2]},2050-01-01 00:00:00,\n" for i in range(STAYS)
        )
    file = folder / f"LABEVENTS.csv{'.gz' if packed else ''}"
    draw = random.Random(0)
    with gzip.open(file, "wt", compresslevel=1) if packed else file.open("w") as stream:
        stream.write(
            "ROW_ID,SUBJECT_ID,HADM_ID,ITEMID,CHARTTIME,VALUE,VALUENUM,VALUEUOM,FLAG\n"
        )
        for row in range(rows):
            stay, (item, unit) = (
                int(draw.random() * STAYS),
                ITEMS[int(draw.random() ** 2 * len(ITEMS))],
            )
            value, at = (
                round(draw.random() * 200, 1),
                starts[stay] + timedelta(minutes=int(draw.random() * 1440)),
            )
            stream.write(
                f"{row},{stay},{100_000 + stay},{item},{at},{value},{value},{unit},\n"
            )
    return file


def measure(folder: Path, way: str) -> dict[str, Any]:
    """Reads the tables in this process."""
    from slimbayes_lab.data import mimic3

    if way == "baseline":
        (folder / "LABEVENTS.csv").unlink(missing_ok=True)
        (folder / "LABEVENTS.csv.gz").unlink(missing_ok=True)
    before = time.process_time()
    events = mimic3(folder).events
    seconds = time.process_time() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    digest = hashlib.sha256()
    for column in (events.patient, events.hours, events.feature, events.value):
        digest.update(column.numpy().tobytes())
    return {
        "way": way,
        "seconds": round(seconds, 2),
        "peak_mib": round(peak),
        "events": len(events),
        "digest": digest.hexdigest()[:16],
    }


def in_a_process(folder: Path, way: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", way, "--folder", str(folder)]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--gz", action="store_true", help="pack the large table")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.folder, arguments.measure)))
        return
    with tempfile.TemporaryDirectory(prefix="slimbayes-events-") as place:
        file = write_tables(Path(place), arguments.rows, arguments.gz)
        size = file.stat().st_size
        results = [
            in_a_process(Path(place), way) for way in reversed(WAYS)
        ]  # the baseline removes the table
    report = {
        "rows": arguments.rows,
        "packed": arguments.gz,
        "file_mb": round(size / 1e6),
        "machine": platform.platform(),
        "results": results,
    }
    print(json.dumps(report, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
