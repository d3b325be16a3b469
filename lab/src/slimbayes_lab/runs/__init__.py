"""One run, from its experiment to its record.

fit.py         opens the directory, trains, evaluates, writes the record     folder.py   what is in the directory
training.py    epochs, and what happens between steps                        step.py     one step
checkpoints.py the state between two steps                                   trained.py  a trained run, read back
predictor.py   a network, what its outputs stand for, its predictions        scores.py   metrics of a set of rows
evaluate.py    the sets that it is judged on
watchers.py    progress on a terminal
process.py     a run in a process of its own, for sweeps and searches
"""
