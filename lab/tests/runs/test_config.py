"""Configs of the lab: closed, typed, round trips, overrides, and errors that name the path and the nearest word."""

import inspect
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import slimbayes_lab.data
import slimbayes_lab.models
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_configs import experiment
from slimbayes_lab.configs import train as recipes
from slimbayes_lab.configs.choices import AUGMENTATIONS, NETWORKS, Named
from slimbayes_lab.configs.experiment import CORRUPTIONS, Experiment
from slimbayes_lab.configs.files import (
    ConfigError,
    load,
    merged,
    parse_override,
    read_tree,
    validate,
)

import slimbayes as sb
from slimbayes.posteriors import METHODS

BASE: dict[str, Any] = {
    "name": "try",
    "data": {"name": "digits"},
    "model": {"kind": "small_cnn", "width": 8},
    "method": {"kind": "Rank1", "members": 2},
    "train": {"epochs": 1, "optimizer": {"kind": "AdamW", "lr": 0.01}},
}


def with_(**changes: Any) -> dict[str, Any]:
    return merged(BASE, changes)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_named_and_survives_the_round_trip(name: str) -> None:
    experiment = validate(with_(method={"kind": name}))
    assert type(experiment.method.build()) is METHODS[name]
    assert experiment.method.build() == METHODS[name](
        **({"members": 2} if name == "Rank1" else {})
    )
    again = validate(json.loads(json.dumps(experiment.resolved)))
    assert again.resolved == experiment.resolved and again.hash == experiment.hash
    assert (
        validate(yaml.safe_load(yaml.safe_dump(experiment.resolved))).hash
        == experiment.hash
    )


KINDS = [model.__name__ for model in NETWORKS]


@pytest.mark.parametrize("model", [*NETWORKS, *AUGMENTATIONS])
def test_options_of_networks_and_augmentations_are_those_of_their_functions(
    model: type[Named],
) -> None:
    parameters = inspect.signature(
        getattr(import_module(model.home), model.__name__)
    ).parameters
    options = {
        name: field for name, field in model.model_fields.items() if name != "kind"
    }
    assert parameters.keys() == options.keys() | set(model.filled)
    defaults = {
        name: p.default
        for name, p in parameters.items()
        if name in options and p.default is not p.empty
    }
    assert defaults == {
        name: field.default
        for name, field in options.items()
        if not field.is_required()
    }


def test_every_network_is_there() -> None:
    public = {
        name
        for name, value in vars(slimbayes_lab.models).items()
        if inspect.isfunction(value)
    }
    assert set(KINDS) == public - {"deep_mlp", "keras_count", "matching_width"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_network_can_be_named_with_its_defaults(kind: str) -> None:
    experiment = validate(with_(model={"kind": kind}))
    assert validate(experiment.resolved).hash == experiment.hash


def test_corruptions_are_those_of_the_data() -> None:
    assert CORRUPTIONS == slimbayes_lab.data.CORRUPTIONS


def test_values_reach_the_method() -> None:
    method = {
        "kind": "Rank1",
        "members": 3,
        "prior": {"kind": "Cauchy", "loc": 1.0, "scale": 0.25},
        "mean_init": {"kind": "Signs", "positive": 0.5},
    }
    built = validate(with_(method=method)).method.build()
    assert built == sb.Rank1(
        members=3, prior=sb.Cauchy(1.0, 0.25), mean_init=sb.Signs(0.5)
    )


def test_methods_by_name_pattern() -> None:
    experiment = validate(
        with_(
            method={
                "kind": "ByName",
                "layers": {"norm.*": {"kind": "ModelPatch"}, ".*": {"kind": "Rank1"}},
            }
        )
    )
    assert experiment.method.build() == {"norm.*": sb.ModelPatch(), ".*": sb.Rank1()}
    assert validate(experiment.resolved).hash == experiment.hash


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": {"epoch": 3}}, "train.epoch: no such field; did you mean 'epochs'?"),
        ({"dta": {}}, "dta: no such field; did you mean 'data'?"),
        (
            {"method": {"kind": "Rank1", "membrs": 4}},
            "method.membrs: no such field; did you mean 'members'?",
        ),
        (
            {"method": {"kind": "Rank2"}},
            "method.kind: unknown 'Rank2'; did you mean 'Rank1'?",
        ),
        (
            {"method": {"kind": "Rank1", "prior": {"kind": "Cauchi"}}},
            "method.prior.kind: unknown 'Cauchi'; did you mean 'Cauchy'?",
        ),
        (
            {"method": {"kind": "Rank1", "prior": {"kind": "Cauchy", "scal": 1}}},
            "method.prior.scal: no such field; did you mean 'scale'?",
        ),
        (
            {
                "method": {
                    "kind": "ByName",
                    "layers": {"fc": {"kind": "KTied", "rnk": 2}},
                }
            },
            "method.layers.fc.rnk: no such field; did you mean 'rank'?",
        ),
        (
            {"method": {"kind": "Rank1", "clip": -1}},
            "method: Rank1: clip must be positive or None, got -1",
        ),
        ({"method": {"members": 2, "kind": None}}, "method"),
        (
            {"model": {"kind": "wrn", "deph": 16}},
            "model.deph: no such field; did you mean 'depth'?",
        ),
        ({"model": {"kind": "wrn", "classes": 16}}, "model.classes: no such field"),
        (
            {"train": {"optimizer": {"kind": "sgd"}}},
            "train.optimizer.kind: unknown 'sgd'; did you mean 'SGD'?",
        ),
        (
            {"train": {"epochs": "many"}},
            "train.epochs: Input should be a valid integer",
        ),
        ({"train": {"early_stop": {}}}, "set data.validation"),
        (
            {"evaluate": {"corruptions": ["fogg"]}},
            "unknown corruption 'fogg'; did you mean 'fog'?",
        ),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
    ],
)
def test_a_fault_is_told_with_its_path(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(with_(**changes))
    assert told in str(error.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        validate(with_(seed=-1, train={"epochs": 0}, data={"nam": 1}))
    assert all(
        path in str(error.value) for path in ("seed:", "train.epochs:", "data.nam:")
    )


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch canary']",
        "a: !!python/name:os.system",
        "- 1",
        "a: [",
        "\x00",
    ],
)
def test_hostile_or_broken_yaml_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match="bad.yaml"):
        load("bad.yaml")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "key", ["class_path", "_target_", "_instantiator", "module", "import"]
)
def test_no_config_can_name_code(key: str) -> None:
    for changes in (
        {key: "os.system"},
        {"model": {key: "os.system"}},
        {"method": {"kind": "os.system"}},
        {"model": {"kind": "os.system"}},
    ):
        with pytest.raises(ConfigError):
            validate(with_(**changes))


def test_a_newer_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="format 2, made for a newer slimbayes"):
        validate(with_(format=2))


def test_files_extend_one_another(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "row.yaml").write_text(
        "extends: ../base.yaml\nname: row\ntrain: {epochs: 7}\nmethod: {kind: KTied}\n"
        "small: {train: {epochs: 2}}\npaper: {x: 1}\n"
    )
    row = load(tmp_path / "sub" / "row.yaml")
    assert (row.name, row.train.epochs, row.method.build(), row.train.optimizer.lr) == (
        "row",
        7,
        sb.KTied(),
        0.01,
    )
    assert load(tmp_path / "sub" / "row.yaml", scale="small").train.epochs == 2
    assert (
        load(
            tmp_path / "sub" / "row.yaml", ["train.epochs=3"], scale="small"
        ).train.epochs
        == 3
    )


def test_a_circle_of_extensions_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    with pytest.raises(ConfigError, match="extends itself"):
        read_tree(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("seed=3", {"seed": 3}),
        ("train.optimizer.lr=1e-3", {"train": {"optimizer": {"lr": 1e-3}}}),
        ("evaluate.draws=[1, 4]", {"evaluate": {"draws": [1, 4]}}),
        ("name=a=b", {"name": "a=b"}),
        ("train.clip=null", {"train": {"clip": None}}),
    ],
)
def test_overrides(text: str, tree: dict[str, Any]) -> None:
    assert parse_override(text) == tree


@pytest.mark.parametrize("text", ["seed", "=3", "a=[1", ""])
def test_wrong_overrides_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_override(text)


def test_another_kind_replaces_a_mapping_whole() -> None:
    assert merged({"m": {"kind": "Rank1", "members": 4}}, {"m": {"kind": "KTied"}}) == {
        "m": {"kind": "KTied"}
    }
    assert merged({"m": {"kind": "Rank1", "members": 4}}, {"m": {"members": 8}}) == {
        "m": {"kind": "Rank1", "members": 8}
    }
    assert merged(
        {"m": {"kind": "Rank1", "members": 4}}, {"m": {"kind": "Rank1", "rank": 2}}
    ) == {"m": {"kind": "Rank1", "members": 4, "rank": 2}}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-6, 1, allow_nan=False), st.integers(1, 16))
def test_equal_configs_have_equal_hashes_and_others_not(
    seed: int, lr: float, members: int
) -> None:
    tree = with_(
        seed=seed, method={"members": members}, train={"optimizer": {"lr": lr}}
    )
    assert validate(tree).hash == validate(validate(tree).resolved).hash
    assert validate(tree).hash != validate(merged(tree, {"seed": seed + 1})).hash


@pytest.mark.slow
def test_the_schema_is_closed_and_accepts_what_we_accept() -> None:
    import jsonschema

    schema = Experiment.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(BASE, schema)
    for wrong in (
        with_(foo=1),
        with_(method={"kind": "Rank2"}),
        with_(train={"epochs": "x"}),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_hash_leaves_out_what_is_as_usual() -> None:
    """So that an option added later, with a default that changes nothing, does not rename the runs that exist."""
    spelled = with_(
        train={"form": "average", "clip": None, "draws": 1},
        method={"rank": 1, "draws": "example"},
        seed=0,
    )
    assert validate(spelled).hash == validate(BASE).hash
    assert validate(with_(train={"clip": 1.0})).hash != validate(BASE).hash
    assert validate(with_(method={"clip": 5.0})).hash != validate(BASE).hash


def test_the_config_in_the_laboratory_s_readme_is_valid() -> None:
    import re

    text = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.S)
    assert blocks and all(
        validate(yaml.safe_load(block)).train.epochs for block in blocks
    )


def test_the_order_of_patterns_is_part_of_the_name() -> None:
    one, two = (
        {"conv.*": {"kind": "Rank1", "members": 2}},
        {".*": {"kind": "BatchEnsemble", "members": 2}},
    )
    first, second = (
        validate(merged(BASE, {"method": {"kind": "ByName", "layers": layers}}))
        for layers in ({**one, **two}, {**two, **one})
    )
    assert (
        list(first.method.build()) != list(second.method.build())
        and first.hash != second.hash
    )


def test_hashes_see_values_not_how_they_are_written() -> None:
    same = (
        {"train": {"epochs": 2.0}},
        {"seed": 0.0},
        {"train": {"optimizer": {"lr": 1e-2}}},
        {"evaluate": {"draws": (1,)}},
        {"method": {"prior": {"kind": "Normal", "loc": 1, "scale": 0.1}}},
    )
    assert {experiment(**changes).hash for changes in same} == {experiment().hash}
    other = (
        {"train": {"schedule": {"kind": "Constant", "warmup": 1}}},
        {"train": {"kl": {"kind": "Constant", "weight": 2}}},
        {"train": {"weight_decay": {}}},
        {"evaluate": {"draws": [1, 2]}},
        {"train": {"l2": {}}},
        {"include": ".*"},
    )
    assert (
        len({experiment(**changes).hash for changes in (*other, {})}) == len(other) + 1
    )


def by_name(pattern: str, method: dict[str, Any]) -> dict[str, Any]:
    return {"method": {"kind": "ByName", "layers": {pattern: method}}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            by_name(
                "x",
                {"kind": "Rank1", "prior": {"kind": "Cauchy", "loc": 1.0, "scal": 1}},
            ),
            "method.layers.x.prior.scal: no such field; did you mean 'scale'?",
        ),
        (
            {"augment": {"kind": "pad_crop_flip", "padd": 1}},
            "augment.padd: no such field; did you mean 'pad'?",
        ),
        (
            {"train": {"Epochs": 3}},
            "train.Epochs: no such field; did you mean 'epochs'?",
        ),
        (by_name("Conv", {"kind": "Rank1", "membrs": 1}), "method.layers.Conv.membrs"),
        ({"train": {"l2": {"patched_weight": 1}}}, "did you mean 'patched_weights'?"),
        ({"train": {"early_stop": {"patiance": 1}}}, "did you mean 'patience'?"),
        ({"evaluate": {"draws": []}}, "evaluate.draws"),
        ({"exclude": "conv("}, "exclude"),
        ({"method": {"kind": "ByName", "layers": {}}}, "method.layers"),
        ({"train": {"optimizer": {"lr": math.inf}}}, "train.optimizer.lr"),
    ],
)
def test_faults_are_told_with_their_path(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(merged(BASE, changes))
    assert told in str(error.value)


@pytest.mark.parametrize(
    "text", ["extends:\n", "extends: 3\n", "extends: [1]\n", "small: 3\n"]
)
def test_wrong_words_beside_the_experiment_are_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(tmp_path / "c.yaml", scale="small")


@pytest.mark.parametrize("milestone", [0.0, 0.5, 0.75, 1.0, pytest.param(0.55)])
def test_rates_fall_at_the_very_step(milestone: float) -> None:
    chosen = recipes.Train(
        epochs=10,
        optimizer={"kind": "SGD"},
        schedule={"kind": "Step", "milestones": [milestone]},
    )  # type: ignore[arg-type]
    assert sum(chosen.rate(step, 10) == 1 for step in range(100)) == round(
        100 * milestone
    )
