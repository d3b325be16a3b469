"""Hostile files: configs, records and saved posteriors that want to hang, to fill the memory, or to be another."""

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

from fault_suite import Count, ask, fault, small_net, small_run
from lab_configs import CPU, dense, experiment
from slimbayes_lab.configs.files import load
from slimbayes_lab.report import record, write_page
from slimbayes_lab.runs.fit import fit

import slimbayes as sb
from slimbayes.files import as_json

TREE = """\
name: t
data: {name: digits}
model: {kind: mlp}
method: {kind: Rank1}
train: {epochs: 1, optimizer: {kind: SGD, lr: 0.1}}
"""


def hostile_configs() -> dict[str, str]:
    """Texts of YAML that a config must not be."""
    lines = [f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 26)]
    bomb = "[&a0 [lol, lol], " + ", ".join(lines) + "]"
    return {
        "aliases that multiply": f"{TREE}include: {bomb}\n",
        "aliases that multiply, in a list that is known": TREE
        + f"evaluate: {{ood: {bomb}}}\n",
        "10,000 nested lists": TREE + "include: " + "[" * 10_000 + "]" * 10_000,
        "10,000 nested mappings": TREE + "include: " + "{a: " * 10_000 + "}" * 10_000,
        "a duplicate key": TREE + "seed: 1\nseed: 2\n",
        "a nested duplicate key": TREE.replace("epochs: 1,", "epochs: 1, epochs: 5,"),
        "seed: yes": TREE + "seed: yes\n",
        "a negative width": TREE.replace("kind: mlp", "kind: mlp, hidden: [-5]"),
        "a python object": TREE + "include: !!python/object/apply:os.system ['true']\n",
        "a name of a megabyte": TREE.replace("name: t", f"name: {'x' * 10**6}"),
        "an unknown key of a megabyte": TREE + f"{'k' * 10**6}: 1\n",
        "a number of a million digits": TREE + f"seed: {'9' * 10**6}\n",
        "not UTF-8": TREE + "include: \udcff\n",
        "a NUL": TREE + "include: \0\n",
        "extends itself": TREE + "extends: [config.yaml]\n",
        "extends a device": TREE + "extends: [/dev/zero]\n",
        "extends a missing file": TREE + "extends: [/nowhere/at/all.yaml]\n",
        "a list": "[1, 2]\n",
        "nothing": "",
    }


@fault(
    "hostile configs: bombs, depth, duplicate keys, old YAML, diamonds, fifos",
    "refused in words within 5 s and 1 GiB, without printing what was refused",
    "PyYAML's safe loader takes bombs and duplicate keys; Hydra and jsonargparse may call what a config names",
)
def hostile_config(place: Path, dice: random.Random) -> Count:
    count, file = Count(), place / "config.yaml"
    for name, text in hostile_configs().items():
        file.write_bytes(text.encode("utf8", "surrogateescape"))
        answer = ask(lambda: load(file).name, seconds=5)
        count.add(answer.refused("config", "/"), f"{name}: {answer}")
    file.write_text(TREE + "seed: 010\n")
    answer = ask(lambda: load(file).seed, seconds=5)
    count.add(
        answer.value == 10 or answer.refused("seed"),
        f"seed: 010 is read as {answer.value}",
    )
    for i in range(26):  # each extends the next one twice
        below = f"extends: [d{i + 1}.yaml, ./d{i + 1}.yaml]\n" if i < 25 else ""
        (place / f"d{i}.yaml").write_text(below + (TREE if i == 25 else ""))
    answer = ask(lambda: load(place / "d0.yaml").name, seconds=5)
    count.add(
        answer.kind == "value" or answer.refused("extends"),
        f"a diamond of 2^25 files: {answer}",
    )
    os.mkfifo(place / "fifo.yaml")
    (place / "folder.yaml").mkdir()
    for special in (place / "fifo.yaml", place / "folder.yaml", Path("/dev/zero")):
        answer = ask(lambda s=special: load(s).name, seconds=5)
        count.add(answer.refused(special.name), f"{special.name}: {answer}")
    return count


def hostile_records(good: dict[str, Any]) -> dict[str, bytes]:
    """Bytes that a record must not be."""
    text = json.dumps(good)
    deep, digits = 10**5, "9" * 10**6
    return {
        "100,000 nested lists": ("[" * deep + "]" * deep).encode(),
        "100,000 nested objects": ('{"a":' * deep + "1" + "}" * deep).encode(),
        "nested lists in it": ('{"config": ' + "[" * deep + "]" * deep + ", " + text[1:]).encode(),
        "a duplicate key": ('{"name": "another", ' + text[1:]).encode(),
        "a number of a million digits": re.sub('"seed": [0-9]+', f'"seed": {digits}', text).encode(),
        "a list": b"[]",
        "not UTF-8": text.encode()[:-1] + b"\xff}",
        "a megabyte of name in the wrong place": json.dumps(good | {"seed": "x" * 10**6}).encode(),
        "a fifo": b"",
    }  # fmt: skip


@fault(
    "hostile records in a report, and runs named like parts of JavaScript's objects",
    "records are refused in words within 5 s, and the page of the others is written; no name becomes code",
    "report tools compared read JSON as it comes",
)
def hostile_record(place: Path, dice: random.Random) -> Count:
    count, good = Count(), small_run(place / "good")
    tree = json.loads((good / "record.json").read_text())
    hostile: list[Path] = []
    for name, data in hostile_records(tree).items():
        hostile.append(place / f"bad-{len(hostile)}")
        hostile[-1].mkdir()
        (hostile[-1] / "record.json").write_bytes(data) if data else os.mkfifo(
            hostile[-1] / "record.json"
        )
        answer = ask(lambda: record.read(hostile[-1]).name, seconds=5)
        count.add(answer.refused("record.json"), f"{name}: {answer}")
    page = ask(
        lambda: write_page([good, *hostile], place / "page.html").exists(), seconds=30
    )
    count.add(page.kind == "value", f"the page of a good one and all of them: {page}")
    names = (
        "__proto__",
        "constructor",
        "toString",
        "</script><script>alert(1)</script>",
    )
    small = {"train_limit": 100, "test_limit": 20}
    runs = [
        fit(experiment(name=name, data=small), place / f"n{i}", CPU)
        for i, name in enumerate(names)
    ]
    page = ask(
        lambda: (
            "<script>alert(1)"
            not in write_page([good, *runs], place / "page.html").read_text()
        ),
        seconds=60,
    )
    count.add(
        page.value is True, f"the page of runs with such names: {page}", len(names)
    )
    return count


@fault(
    "hostile saved posteriors: damaged configs with matching checksums",
    "refused in words within 5 s and 1 GiB",
    "pickled models run the code they carry; safetensors' header was fuzzed with 38 million inputs without a crash",
)
def hostile_posterior(place: Path, dice: random.Random) -> Count:
    count, whole = Count(), place / "net"
    sb.save(small_net(), whole, base=True)
    file = next(
        f
        for f in sorted(whole.iterdir())
        if f.suffix == ".json" and f.name != "manifest.json"
    )
    tree = json.loads(file.read_text())
    texts = [text for text in _changes(tree) if text != json.dumps(tree)]
    texts += [
        "[" * 100_000 + "]" * 100_000,
        "[]",
        "{}",
        "null",
        json.dumps(tree).replace('"members": 2', '"members": 1000000000'),
    ]
    for number, text in enumerate(texts):
        folder = shutil.copytree(whole, place / str(number))
        (folder / file.name).write_text(text)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sha256"][file.name] = hashlib.sha256(text.encode()).hexdigest()
        (folder / "manifest.json").write_bytes(as_json(manifest))
        answer = ask(
            lambda folder=folder: sb.load(dense(3), folder) is not None, seconds=5
        )
        refusal = answer.kind == "refusal" and len(answer.message) < 1500
        count.add(refusal or answer.kind == "value", f"{text[:60]}: {answer}")
    return count


def _changes(tree: Any) -> list[str]:
    """A JSON object with each of its parts taken away or of another type."""
    out = []
    for key in tree:
        out.append(json.dumps({k: v for k, v in tree.items() if k != key}))
        out += [json.dumps(tree | {key: odd}) for odd in (None, -1, "x", [], {}, [[1]])]
    return out
