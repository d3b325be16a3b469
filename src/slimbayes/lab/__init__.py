"""The lab: train, evaluate, compare and show experiments. The heavy dependencies live only here."""
