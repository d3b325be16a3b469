"""A stand-in for `slimbayes fit` that starts at once and "trains" as `plan.json` in its run directory says.

Plan: steps; pause, seconds of a step; every, steps between checkpoints; die, {start: [step, -signal or exit code]};
deaf, ignore SIGTERM; together, wait until so many runs of this sweep have started; hash, of the record at the end. It notes its starts, its GPU, and that it was asked to stop.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

RECORD = {
    "name": "fake", "method": "none", "data": "none", "seed": 0, "config": {}, "commands": [],
    "parameters": {"plain": 1, "total": 1}, "cost": {"train_seconds": 1.0, "seconds_per_epoch": 1.0},
}  # fmt: skip


def main() -> None:
    words = sys.argv[1:]
    folder = Path(words[words.index("--out") + 1])
    plan = json.loads((folder / "plan.json").read_text())
    with open(folder / "starts", "a") as handle:
        handle.write(f"{time.time()} {os.getpid()}\n")
    start = len((folder / "starts").read_text().splitlines())
    asked: list[int] = []
    signal.signal(
        signal.SIGTERM,
        signal.SIG_IGN if plan.get("deaf") else lambda *_: asked.append(1),
    )
    (folder / "environment.json").write_text("{}")
    (folder / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    done = [int(p.name[5:]) for p in folder.glob("checkpoints/step-*")]
    step = max(done, default=0) if "--resume" in words else 0
    death = plan.get("die", {}).get(str(start)) or plan.get("die", {}).get("always")
    while len(list(folder.parent.glob("*/starts"))) < plan.get("together", 0):
        time.sleep(0.01)
    while step < plan.get("steps", 5):
        time.sleep(plan.get("pause", 0.02))
        step += 1
        if death and step >= death[0]:
            die(death[1])
        if asked or step % plan.get("every", 1) == 0:
            (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True, exist_ok=True)
        if asked:
            (folder / "asked").touch()
            sys.exit(143)
    (folder / "record.json").write_text(
        json.dumps(RECORD | {"config_hash": plan.get("hash", "")})
    )
    (folder / "ended").write_text(f"{time.time()}\n")


def die(how: int) -> None:
    if how < 0:
        os.kill(os.getpid(), -how)
        time.sleep(60)
    print("something was said before", file=sys.stderr)
    print("RuntimeError: no such luck", file=sys.stderr)
    sys.exit(how)


if __name__ == "__main__":
    main()
