"""Weights trained for skipping, or since they were pruned: a model that says, with channels skipped or weights set to
zero, what it said with all of them.

options.py    what may be asked for
updates.py    what is trained of a matrix, and how a model computes with it
teacher.py    what a pruned model learns from
train.py      the training, against the model as it was or that teacher
measure.py    how far a model is from the one that it should follow, sparse and dense
run.py        the checkpoint with the trained matrices

The loop and the thresholds are those of `global` (`sparsity.training`, `sparsity.soft_channels`); what was done stands
in a record beside the distilled checkpoint (`models.records.distilled`).
"""
