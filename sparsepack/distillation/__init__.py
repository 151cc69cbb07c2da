"""Weights trained for skipping: a model that says, with channels skipped, what it said with all of them.

options.py    what may be asked for
updates.py    what is trained of a matrix, and how a model computes with it
train.py      the training, against the model as it was
measure.py    how far a model is from the one that it should follow, sparse and dense
run.py        the checkpoint with the trained matrices

The loop and the thresholds are those of `global` (`sparsity.training`, `sparsity.soft_channels`); what was done stands
in a record beside the distilled checkpoint (`models.records.distilled`).
"""
