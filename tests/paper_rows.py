"""All rows of the papers' tables and figures, read once for all tests."""

from pathlib import Path

from slimbayes.lab.papers.rows import find, listings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments"
ROWS = [row for name in listings([FOLDER]) for row in find(name, [FOLDER])]
