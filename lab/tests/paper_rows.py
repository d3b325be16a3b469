"""All rows of the papers' tables and figures, read once for all tests."""

from pathlib import Path

from slimbayes_lab.papers.rows import find, listings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lab" / "experiments"
ROWS = [row for name in listings([FOLDER]) for row in find(name, [FOLDER])]
