"""Writes the tables of this folder's README from the records in results/cifar10.

python experiments/cifar10/table.py
"""

from pathlib import Path

from slimbayes.report import compare

HERE = Path(__file__).parent
RECORDS = sorted((HERE.parents[1] / "results" / "cifar10").glob("*.json"))


def main() -> None:
    parts = []
    for on, metrics in (
        ("test", ("accuracy", "nll", "ece", "brier")),
        ("corrupted", ("accuracy", "nll", "ece")),
        ("ood", ("auroc", "fpr95")),
    ):
        parts += [compare(RECORDS, on=on, metrics=metrics).to_markdown(), ""]
    page = HERE / "README.md"
    before, rest = page.read_text().split("<!-- tables -->\n")
    after = rest.split("<!-- end tables -->")[1]
    page.write_text(f"{before}<!-- tables -->\n" + "\n".join(parts) + f"<!-- end tables -->{after}")


if __name__ == "__main__":
    main()
