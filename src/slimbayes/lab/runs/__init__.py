"""One run: its directory, training, checkpoints, evaluation and record."""
