"""Configs, records and checkpoints that somebody else wrote: they work, or are refused in few words and little time.

lab/tests/corpus has what once failed, and refusals.json what each is told. The fuzzers below make more: the same cases each
time, a few hundred of each kind; SLIMBAYES_FUZZ=10000 makes so many new ones.
"""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from covering import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab_configs import BASE, METHODS
from report_records import record
from safetensors.torch import save as dump_tensors
from slimbayes_lab.configs import yaml_text
from slimbayes_lab.configs.files import (
    ConfigError,
    load,
    merged,
    parse_override,
    read_tree,
    row_names,
    validate,
)
from slimbayes_lab.data.archives import map_npy, read_idx, read_npz, read_xz
from slimbayes_lab.report import compare, write_page
from slimbayes_lab.report.record import RecordError, read
from slimbayes_lab.runs.checkpoints import latest_checkpoint, save_checkpoint
from slimbayes_lab.runs.folder import RunError
from slimbayes_lab.runs.trained import read_predictor
from slimbayes_lab.sweep import combinations
from torch import nn

import slimbayes as sb
from slimbayes.errors import brief
from slimbayes.untrusted import parse_json, read_file

CORPUS = Path(__file__).parents[1] / "corpus"
REFUSALS: dict[str, str] = json.loads((CORPUS / "refusals.json").read_text())
MORE = int(os.environ.get("SLIMBAYES_FUZZ", 0))
LONG = 4000  # characters of a refusal, at most


def fuzz(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a fuzzer; one that was asked for more cases takes as long as it takes."""
    calm = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    chosen = settings(
        max_examples=MORE or 60,
        derandomize=not MORE,
        deadline=None,
        database=None,
        suppress_health_check=calm,
    )
    return pytest.mark.slow(pytest.mark.timeout(0 if MORE else 240)(chosen(test)))


def of(kind: str) -> list[str]:
    return [name for name in REFUSALS if name.startswith(kind)]


@contextmanager
def refused(
    error: type[Exception], told: str = "", seconds: float = 1.0
) -> Iterator[None]:
    """The body raises this very error, which says `told` in bounds, and soon."""
    start = time.process_time()
    with pytest.raises(error) as found:
        yield
    assert type(found.value) is error
    assert told in str(found.value) and len(str(found.value)) < LONG
    assert time.process_time() - start < seconds


@contextmanager
def or_refused(*errors: type[Exception]) -> Iterator[None]:
    """The body works, or raises one of these very errors with a message in bounds, and soon."""
    start = time.process_time()
    try:
        yield
    except errors as error:
        _check_refusal(error, errors)
    assert time.process_time() - start < 2


def _check_refusal(error: Exception, errors: tuple[type[Exception], ...]) -> None:
    assert type(error) in errors and len(str(error)) < LONG


# --- what once failed ---


@pytest.mark.parametrize("name", of("configs"))
def test_configs_that_once_failed(name: str) -> None:
    tree: Any = None
    with refused(ConfigError, REFUSALS[name]):
        tree = read_tree(CORPUS / name)
        rows = row_names(tree)
        load(f"{CORPUS / name}#{rows[0]}" if rows else CORPUS / name)


@pytest.mark.parametrize("name", of("records"))
def test_records_that_once_failed(name: str) -> None:
    with refused(RecordError, REFUSALS[name]):
        read(CORPUS / name)


def test_the_whole_corpus_is_expected() -> None:
    assert {str(file.relative_to(CORPUS)) for file in CORPUS.glob("*/*")} == set(
        REFUSALS
    )


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "posterior"
    return sb.save(sb.bayesianize(plain(), sb.Rank1(members=2)), folder, base=True)


def forged(saved: Path, folder: Path, **files: bytes) -> Path:
    """A copy of a checkpoint with other files (config_json, ...), whose manifest agrees."""
    folder.mkdir(exist_ok=True)
    contents = {
        name: (saved / name).read_bytes()
        for name in os.listdir(saved)
        if name != "manifest.json"
    }
    contents |= {name.replace("_", "."): data for name, data in files.items()}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    (folder / "manifest.json").write_text(
        json.dumps({"library": "slimbayes", "format": 1, "sha256": hashes})
    )
    return folder


@pytest.mark.parametrize("name", of("checkpoints"))
def test_checkpoints_that_once_failed(name: str, saved: Path, tmp_path: Path) -> None:
    model = plain()
    with refused(sb.CheckpointError, REFUSALS[name]):
        sb.load(
            model,
            forged(
                saved, tmp_path / "forged", config_json=(CORPUS / name).read_bytes()
            ),
        )
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert not hasattr(model[0], "posterior")


# --- files ---


def special(kind: str, folder: Path, name: str) -> Path:
    path = folder / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(folder)  # their names must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
        os.chdir(here)
    elif kind == "loop":
        path.symlink_to(path)
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket", "loop"])
def test_what_is_no_regular_file_is_refused_unopened(
    kind: str, saved: Path, tmp_path: Path
) -> None:
    loop = (
        "loop" if sys.version_info < (3, 13) else "symbolic links"
    )  # as Python says it
    with refused(
        ConfigError, loop if kind == "loop" else f"it is a {kind}, not a regular file"
    ):
        load(special(kind, tmp_path, "config.yaml"))
    with refused(RecordError, "cannot be read"):
        read(special(kind, tmp_path, "record.json"))
    other = forged(saved, tmp_path / "forged")
    (other / "config.json").unlink()
    special(kind, other, "config.json")
    with refused(sb.CheckpointError, "cannot be read"):
        sb.load(plain(), other)


@pytest.mark.parametrize(
    ("reader", "kind"),
    each(
        [
            read_npz,
            read_xz,
            lambda file: map_npy(file, (None,), "f"),
        ],
        ["pipe", "folder", "device"],
    ),
)
def test_readers_of_data_wait_for_no_pipe(
    reader: Callable[[Path], Any], kind: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, OSError), match="not a regular file"):
        reader(special(kind, tmp_path, "data"))
    with pytest.raises((ValueError, OSError), match="not a regular file"):
        read_idx(special(kind, tmp_path, "data.gz"), 1)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "record.json", "wb") as file:
        file.truncate(1 << 40)  # a sparse file
    with refused(RecordError, "it has more than the 16,777,216 bytes"):
        read(tmp_path)
    os.rename(tmp_path / "record.json", tmp_path / "config.yaml")
    with refused(ConfigError, "it has more than the 1,048,576 bytes"):
        load(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "text", ["{}", "[1, {}]", '"' + "[" * 1000 + '"', "[" * 64 + "]" * 64]
)
def test_json_within_bounds_is_read(text: str) -> None:
    assert parse_json(text) == json.loads(text)


def test_reading_gives_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)))
    assert read_file(tmp_path / "file") == bytes(range(256))


# --- configs ---


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_diamond_of_files_reads_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(15):
        write(
            tmp_path, **{f"f{i}": f"extends: [f{i + 1}.yaml, f{i + 1}.yaml]\nseed: {i}"}
        )
    write(tmp_path, f15="name: last\nseed: 15")
    seen: list[Path] = []
    monkeypatch.setattr(
        "slimbayes_lab.configs.files.read_file",
        lambda file, limit: seen.append(file) or read_file(file, limit),
    )
    assert read_tree(tmp_path / "f0.yaml") == {"name": "last", "seed": 0}
    assert len(seen) == 16


def test_chains_and_crowds_of_files_are_bounded(tmp_path: Path) -> None:
    write(tmp_path, **{f"f{i}": f"extends: f{i + 1}.yaml" for i in range(30)}, f30="{}")
    with refused(ConfigError, "20 one after another"):
        read_tree(tmp_path / "f0.yaml")
    write(
        tmp_path,
        **{f"g{i}": "{}" for i in range(200)},
        all=f"extends: [{', '.join(f'g{i}.yaml' for i in range(200))}]",
    )
    with refused(ConfigError, "more than 100 files"):
        read_tree(tmp_path / "all.yaml")


def test_a_circle_through_a_row_is_named(tmp_path: Path) -> None:
    write(tmp_path, a="extends: a.yaml#r\nrows: {r: {seed: 1}}")
    with refused(ConfigError, "extends itself"):
        read_tree(tmp_path / "a.yaml#r")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("0o10", 8), ("0x1F", 31), ("-3", -3), ("+3", 3), ("1e-3", 1e-3), (".5", 0.5), ("5.", 5.0),
        ("1_000", "1_000"), ("yes", "yes"), ("On", "On"), ("n", "n"), ("1:30", "1:30"), ("2001-01-01", "2001-01-01"),
        ("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None), ('"1"', "1"), ("'true'", "true"),
        ("-.inf", -float("inf")), ("0b11", "0b11"), ("=", "="), ("0x", "0x"), ("08", 8), ("1e3", 1000.0), ("e3", "e3"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = yaml_text.parse(f"[{text}]" if text else "- ")[0]
    assert found == value and type(found) is type(value)


def test_aliases_and_merge_keys_are_copies() -> None:
    tree = yaml_text.parse(
        "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\nd: {<<: [{x: 7}, *a], z: 1}\n"
    )
    assert tree == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 1, "y": 2},
        "d": {"x": 7, "y": 2, "z": 1},
    }
    assert tree["a"] is not tree["c"]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert read_tree(tmp_path / "a.yaml") == {"seed": 1}


@pytest.mark.parametrize(
    "value",
    ["{a: 1, a: 2}", "!!python/name:os.system x", "[" * 200, "*a", '"\\', "9" * 1000],
)
def test_hostile_overrides_are_refused(value: str) -> None:
    with refused(ConfigError, "--set seed"):
        parse_override(f"seed={value}")
    with refused(ConfigError, "--set"):
        parse_override(f"{'a.' * 500}b=1")


def test_a_hostile_sweep_is_refused(tmp_path: Path) -> None:
    write(tmp_path, sweep=yaml_text.dump(BASE))
    for over in (
        "y" * 5000,
        "seed=" + "[" * 5000,
        "seed=[" + "x" * 5000 + "]",
        "x" * 5000 + "=[1]",
    ):
        with refused(ConfigError):
            combinations(tmp_path / "sweep.yaml", tmp_path, [over])


def test_a_sweep_of_too_many_runs_is_refused(tmp_path: Path) -> None:
    write(tmp_path, sweep=yaml_text.dump(BASE))
    with refused(ConfigError, "1,000,000,000,000 combinations, more than 10,000"):
        combinations(
            tmp_path / "sweep.yaml",
            tmp_path,
            [f"a{i}=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]" for i in range(12)],
        )


def test_what_is_quoted_is_short() -> None:
    for value in (
        "x" * 10**6,
        list(range(10**5)),
        {i: "x" * 1000 for i in range(10**4)},
        10**4000,
        b"x" * 10**6,
    ):
        assert len(brief(value)) < 600


# --- records ---


@pytest.mark.slow
def test_a_bad_record_never_takes_the_others_down(tmp_path: Path) -> None:
    for i, name in enumerate(of("records")):
        (tmp_path / f"bad{i}").mkdir()
        (tmp_path / f"bad{i}" / "record.json").write_bytes((CORPUS / name).read_bytes())
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "record.json").write_text(
        record("good", 0, corruptions=1).model_dump_json()
    )
    os.mkfifo(special("folder", tmp_path, "pipe") / "record.json")
    table = compare([tmp_path])
    assert [row.name for row in table.rows] == ["good"] and len(table.skipped) == len(
        of("records")
    ) + 1
    page = write_page([tmp_path], tmp_path / "page.html").read_text()
    assert all(f"bad{i}/record.json" in page for i in range(len(of("records"))))


def test_a_run_whose_inputs_are_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml_text.dump(validate(BASE).resolved))
    (tmp_path / "inputs.json").write_bytes(b"[" * 20_000)
    with refused(RunError, "nested deeper than 64"):
        read_predictor(tmp_path, torch.device("cpu"))


# --- checkpoints ---


def header(**fields: Any) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        header(a={"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}),
        header(a={"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]})
        + bytes(16),
        header(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}) + bytes(8),
        header(a={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}) + bytes(4),
        (2**63 - 1).to_bytes(8, "little") + b"{}",
        (20_000).to_bytes(8, "little") + b"[" * 20_000,
        b"",
    ],
)
def test_a_header_that_lies_is_refused(
    data: bytes, saved: Path, tmp_path: Path
) -> None:
    for name in ("posterior_safetensors", "base_safetensors"):
        with refused(sb.CheckpointError, "is not a valid safetensors file"):
            sb.load(plain(), forged(saved, tmp_path / name, **{name: data}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("0.weight"), "it lacks 0.weight"),
        (
            lambda t: t.update({"0.weight": torch.zeros(3, 5)}),
            r"0.weight is [3, 5] but [3, 4] is wanted",
        ),
        (lambda t: t.update({"x" * 5000: torch.zeros(1)}), "it has xxx"),
    ],
)
def test_base_weights_must_be_those_of_the_model(
    change: Callable[[dict[str, torch.Tensor]], Any],
    told: str,
    saved: Path,
    tmp_path: Path,
) -> None:
    weights, model = plain().state_dict(), plain()
    change(weights)
    with refused(sb.CheckpointError, told):
        sb.load(
            model,
            forged(
                saved, tmp_path / "forged", base_safetensors=dump_tensors(dict(weights))
            ),
        )
    assert not hasattr(model[0], "posterior")


def test_a_checkpoint_of_training_that_is_nested_too_deeply_is_skipped(
    tmp_path: Path,
) -> None:
    save_checkpoint(
        tmp_path, 1, {"network/a": torch.zeros(1)}, {"curve": [], "hash": "x"}
    )
    save_checkpoint(
        tmp_path, 2, {"network/a": torch.zeros(1)}, {"curve": [], "hash": "x"}
    )
    state = tmp_path / "step-00000002" / "state.json"
    state.write_bytes(b"[" * 20_000)
    manifest = state.with_name("manifest.json")
    hashes = json.loads(manifest.read_text())
    hashes["sha256"]["state.json"] = hashlib.sha256(state.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(hashes))
    with pytest.warns(UserWarning, match="nested deeper than 64"):
        found = latest_checkpoint(tmp_path)
    assert found is not None and found[1]["step"] == 1


# --- fuzzers ---

WORDS = [
    "kind",
    "name",
    "seed",
    "method",
    "extends",
    "rows",
    "axes",
    "paper",
    "row",
    "small",
    "<<",
    "#a",
    "base",
    "",
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 3),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
keys = st.sampled_from(WORDS) | st.text(max_size=4)
any_tree = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)
PIECES = [
    "a", "b: ", "- ", "[", "]", "{", "}", ", ", "\n", "\n  ", "&a ", "*a", "<<: ", "!!int ", '"', "'", "|\n", "? ",
    "---\n", "...\n", "#", "%YAML 1.1\n", "1e5", ".nan", "010", "\0", "\ufeff", "\x85", "extends: ", "rows: ", "\t",
    "~", "@", "`",
]  # fmt: skip


@fuzz
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)
)
def test_any_text_is_a_config_or_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text.encode("utf8", errors="surrogatepass"))
    with or_refused(ConfigError):
        load(file)


@fuzz
@given(any_tree)
def test_yaml_comes_back_as_it_was(tree: Any) -> None:
    text = yaml_text.dump(tree)
    if any(
        mark in text for mark in ("<<", ".nan")
    ):  # a merge key is no key, and NaN equals nothing
        with or_refused(yaml_text.YamlError):
            yaml_text.parse(text)
    else:
        assert yaml_text.parse(text) == tree


def mutated(tree: Any, place: int, new: Any) -> Any:
    """A tree with its node number `place` replaced."""
    count = -1

    def walk(node: Any) -> Any:
        nonlocal count
        count += 1
        if count == place:
            return new
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        return [walk(value) for value in node] if isinstance(node, list) else node

    return walk(tree)


EXPERIMENTS = [
    validate(merged(BASE, {"method": method})) for method in METHODS.values()
]
FULL = [json.loads(json.dumps(experiment.resolved)) for experiment in EXPERIMENTS]
ODD = [
    -5,
    0,
    True,
    "",
    "yes",
    "x" * 5000,
    None,
    [],
    {},
    [[]],
    1e308,
    -1e-320,
    2**70,
    {"kind": []},
    {"kind": "Normal"},
]
odd = st.sampled_from(ODD) | any_tree


@pytest.mark.parametrize("tree", FULL, ids=list(METHODS))
def test_configs_as_they_were_written_before_are_read(tree: dict[str, Any]) -> None:
    assert (
        yaml_text.parse(yaml.safe_dump(tree, sort_keys=False))
        == tree
        == yaml_text.parse(yaml_text.dump(tree))
    )


@fuzz
@given(st.sampled_from(FULL), st.integers(0, 90), odd)
def test_any_change_of_a_config_is_valid_or_refused(
    tree: dict[str, Any], place: int, new: Any
) -> None:
    changed = mutated(tree, place, new)
    with or_refused(ConfigError):
        found = validate(changed if isinstance(changed, dict) else {})
        assert validate(found.resolved).hash == found.hash


@fuzz
@given(
    any_tree,
    st.sampled_from(["rows", "axes", "extends", "paper", "small"]),
    st.booleans(),
)
def test_any_table_is_read_or_refused(
    tmp_path: Path, tree: Any, key: str, within: bool
) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(
        yaml_text.dump({key: {"a": tree, "b": {key: tree}} if within else tree})
    )
    with or_refused(ConfigError):
        for row in row_names(read_tree(file)):
            read_tree(Path(f"{file}#{row}"))


PATHS = [
    "seed",
    "method",
    "method.members",
    "train.optimizer",
    "train.epochs",
    "data.name",
    "name",
    ".",
    "",
    "a.b",
    "...",
]
axes = st.dictionaries(
    st.sampled_from(PATHS),
    st.lists(any_tree, max_size=3) | st.dictionaries(keys, any_tree, max_size=3),
)


@fuzz
@given(axes)
def test_any_sweep_has_runs_or_is_refused(
    tmp_path: Path, varied: dict[str, Any]
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml_text.dump(BASE))
    with or_refused(ConfigError):
        combinations(
            file,
            tmp_path,
            [f"{path}={json.dumps(values)}" for path, values in varied.items()],
        )


RECORD = json.loads(record("good", 0, corruptions=1).model_dump_json())
RECORD["evaluations"] = RECORD["evaluations"][:2]


@fuzz
@given(st.integers(0, 400), odd)
def test_any_change_of_a_record_is_read_and_compared_or_refused(
    tmp_path: Path, place: int, new: Any
) -> None:
    (tmp_path / "record.json").write_text(json.dumps(mutated(RECORD, place, new)))
    with or_refused(RecordError):
        read(tmp_path)
        with or_refused(ValueError, RecordError):  # nothing is left to compare
            compare([tmp_path])


@fuzz
@given(st.sampled_from(["config.json", "manifest.json"]), st.integers(0, 60), odd)
def test_any_change_of_a_checkpoint_is_loaded_or_refused(
    saved: Path, tmp_path: Path, name: str, place: int, new: Any
) -> None:
    model, folder = plain(), forged(saved, tmp_path / "forged")
    changed = json.dumps(
        mutated(json.loads((folder / name).read_text()), place, new)
    ).encode()
    if name == "manifest.json":
        (folder / name).write_bytes(changed)
    else:
        forged(saved, folder, config_json=changed)
    with or_refused(sb.CheckpointError):
        sb.load(model, folder)
        return
    assert not any(hasattr(layer, "posterior") for layer in model)
