"""The `slimbayes` command, and what it does, from a YAML file to a table beside a paper's.

configs/     what a config may say, read and checked without torch; `slimbayes init` writes one
tasks/       from a config's data to rows: known sets, or tables, arrays and pictures of one's own
runs/        one run: its directory, training, checkpoints, evaluation, record
finished/    a finished run in use: predict, export, stack, diagnose
papers/      tables and figures of papers: their rows are configs, ours beside theirs

command.py, run_commands.py    the command line            execution.py    devices, processes, seeds of a run
sweep.py                       many runs                   search.py       Optuna and Ray Tune over runs

Each folder knows those above it.
"""
