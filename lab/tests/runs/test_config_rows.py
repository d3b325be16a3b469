"""Files of several experiments: what lies over what, how runs are named, and what is refused."""

from pathlib import Path

import pytest
from slimbayes_lab.configs.files import ConfigError, load, read_tree, row_names


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "base.yaml").write_text(
        "data: {name: digits}\nmodel: {kind: mlp, hidden: [8]}\n"
    )
    (tmp_path / "nets" / "methods.yaml").write_text(
        "rows:\n  plain: {extends: base.yaml, name: 'net-{row}', method: {kind: Deterministic}}\n"
        "  tied: {extends: '#plain', method: {kind: KTied, rank: 1}, train: {batch: 8}}\n"
    )
    file = tmp_path / "table.yaml"
    file.write_text("""
name: "{posterior}, {row}"
train: {epochs: 3, batch: 4, optimizer: {kind: Adam}}
axes:
  posterior:
    plain: {extends: nets/methods.yaml#plain, paper: {row: Plain}}
    tied: {extends: nets/methods.yaml#tied, paper: {row: Tied}}
  length: {short: {train: {epochs: 1}, paper: {row: short}}, long: {train: {epochs: 9}, paper: {row: long}}}
rows:
  tied-long: {method: {rank: 2}}
""")
    return file


def test_a_row_lies_over_its_axes_and_these_over_the_file(table: Path) -> None:
    assert row_names(read_tree(table)) == [
        "plain-short",
        "plain-long",
        "tied-short",
        "tied-long",
    ]
    rows = {name: load(f"{table}#{name}") for name in row_names(read_tree(table))}
    assert [row.train.epochs for row in rows.values()] == [1, 9, 1, 9]
    assert (rows["tied-short"].method.rank, rows["tied-long"].method.rank) == (1, 2)
    assert {row.train.batch for row in rows.values()} == {4}, (
        "the file's own values lie over what its rows extend"
    )
    assert rows["tied-long"].name == "tied, tied-long" and rows[
        "tied-long"
    ].model.hidden == (8,)
    assert read_tree(Path(f"{table}#tied-long"))["paper"] == {"row": "Tied, long"}
    assert (
        load(
            f"{table.parent}/nets/methods.yaml#tied",
            ["train.epochs=1", "train.optimizer.kind=SGD"],
        ).name
        == "net-tied"
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "table.yaml",
            "",
            "holds 4 experiments: name one of them, as in .*table.yaml#plain-short",
        ),
        (
            "table.yaml#tied-lnog",
            "",
            "There is no row 'tied-lnog'; did you mean 'tied-long'",
        ),
        (
            "odd.yaml#a",
            "rows: {a: {extends: '#b'}, b: {extends: '#a'}}",
            "rows.b extends #a",
        ),
        ("odd.yaml#a", "rows: {a: {extends: 'odd.yaml#a'}}", "extends itself"),
        ("odd.yaml#a", "extends: nets/loop.yaml#b\nrows: {a: {}}", "extends itself"),
        ("odd.yaml", "extends: '#a'\nrows: {a: {}}", "cannot extend a row of its own"),
        ("#a", "", "#a cannot be read"),
        ("odd.yaml#a", "rows: {a: 3}", "must be a mapping of fields, got 3"),
        ("odd.yaml#a", "rows: [a]", "rows must be a mapping"),
        (
            "odd.yaml#a",
            "axes: {k: {a: {}}}\nrows: {b: {}}",
            "rows.b is no combination of the axes",
        ),
        ("odd.yaml#a", "axes: {k: [a]}", "mappings from labels"),
        (
            "odd.yaml#1",
            "axes: {k: {1: {}}}",
            "a key must be text, got 1: put it in quotes",
        ),
    ],
)
def test_wrong_rows_are_named(table: Path, name: str, text: str, message: str) -> None:
    (table.parent / "odd.yaml").write_text(text)
    (table.parent / "nets" / "loop.yaml").write_text(
        "extends: ../odd.yaml#a\nrows: {b: {}}"
    )
    with pytest.raises(ConfigError, match=message):
        load(table.parent / name)
