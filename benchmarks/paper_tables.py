"""lab/results/<paper>.md: the tables and figures of each paper, from the runs kept in lab/results/<paper>.jsonl.

python benchmarks/paper_tables.py                            all pages
python benchmarks/paper_tables.py take FOLDER PAPER/TABLE    the same, after keeping a folder that `reproduce` wrote
"""

from __future__ import annotations

import sys
from pathlib import Path

import uci_splits
from slimbayes_lab.papers.table import markdown
from slimbayes_lab.report import kept

from slimbayes.untrusted import parse_json, read_file

RESULTS = Path(__file__).resolve().parents[1] / "lab" / "results"
PAPERS = ("rank1", "k_tied", "emp")


def page(paper: str, results: Path = RESULTS) -> str:
    """All tables of a paper, by the folder that each was made in."""
    runs = results / f"{paper}.jsonl"
    parts = [
        f"# Tables and figures of {paper}",
        f"Made from {runs.name} by `make reproduction`; do not edit.",
    ]
    for file in kept.glob(runs, "*/table.json"):
        title, _, table = markdown(kept.load(file)).partition("\n\n")
        parts.append(f"## {file.parent.name}")
        parts.append(f"**{title.removeprefix('# ')}**")
        parts.append(table.strip())
    if kept.exists(runs / "uci-splits"):
        parts.append("## uci-splits")
        parts.append(uci_splits.table(runs / "uci-splits").strip())
    return "\n\n".join(parts) + "\n"


def take(folder: Path, name: str, results: Path = RESULTS) -> None:
    """Keep the records, diagnostics and table of a folder of `reproduce`; name is <paper>/<folder>."""
    paper, _, table = name.partition("/")
    if not table:
        raise ValueError(f"needed <paper>/<table>, got {name!r}.")
    contents = {}
    for pattern in ("table.json", "diagnostics/*.json", "*/record.json"):
        for file in sorted(folder.glob(pattern)):
            content = parse_json(read_file(file))
            content.pop("sha256", None)  # of the file as it was
            contents[f"{table}/{file.relative_to(folder).as_posix()}"] = content
    kept.keep(results / f"{paper}.jsonl", contents)


def main(words: list[str]) -> None:
    if words[:1] == ["take"]:
        take(Path(words[1]), words[2])
    for paper in PAPERS:
        (RESULTS / f"{paper}.md").write_text(page(paper))


if __name__ == "__main__":
    main(sys.argv[1:])
