"""Weights trained for skipping, or since they were pruned: a model that says, with channels skipped or weights set to
zero, what it said with all of them.

options.py    what may be asked for
train.py      what is trained of a matrix, the training against the model as it was or a teacher, and how far it is
run.py        the checkpoint with the trained matrices

The loop and the thresholds are those of `global` (`sparsity.training`, `sparsity.learned`); what was done stands
in a record beside the distilled checkpoint (`models.records.distilled`).
"""
