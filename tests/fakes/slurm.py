"""Enough of SLURM for one machine: sbatch, srun, sacct and scontrol requeue, by the name this file is called with. Its state is a folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_SLURM"])


def sbatch(file: str) -> None:
    number = 1000 + len(list(STATE.glob("*.sh")))
    script = STATE / f"{number}.sh"
    script.write_text(Path(file).read_text())
    array = re.search(r"--array=0-(\d+)", script.read_text())
    for task in range(int(array[1]) + 1) if array else [None]:
        name = str(number) if task is None else f"{number}_{task}"
        variables = {
            "SLURM_JOB_ID": str(number),
            "SLURM_NTASKS": "1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        }
        if task is not None:
            variables |= {"SLURM_ARRAY_JOB_ID": str(number), "SLURM_ARRAY_TASK_ID": str(task)}
        # A session of its own: the scheduler outlives whoever submits.
        words = [sys.executable, __file__, "keep", name, str(script)]
        process = subprocess.Popen(
            words,
            env=os.environ | variables,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=open(STATE / f"{name}.err", "w"),  # noqa: SIM115
        )
        (STATE / f"{name}.json").write_text(json.dumps({"pid": process.pid}))
    print(f"Submitted batch job {number}")


def keep(name: str, script: str) -> None:
    while True:
        subprocess.run(["bash", script])
        if not (STATE / f"{name}.requeue").exists():
            break
        (STATE / f"{name}.requeue").unlink()
    (STATE / f"{name}.done").touch()


def srun(*words: str) -> None:
    rest = list(words)
    output = Path(os.devnull)
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            name = rest.pop(0)
            output = Path(name) if option == "--output" else output
    output = Path(re.sub("%.", "x", str(output)))
    with open(output, "a") as handle:
        sys.exit(subprocess.run(rest, stdout=handle, stderr=handle).returncode)


def sacct(*words: str) -> None:
    print("JobID|State|NodeList")
    for file in STATE.glob("*.json"):
        print(f"{file.stem}|{'COMPLETED' if (STATE / f'{file.stem}.done').exists() else 'RUNNING'}|here")


def scontrol(verb: str, name: str) -> None:
    assert verb == "requeue"
    (STATE / f"{name}.requeue").touch()


if __name__ == "__main__":
    {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scontrol": scontrol, "keep": keep}[sys.argv[1]](*sys.argv[2:])
