"""Bases of the residual stream: the same model in coordinates that skip, or round, with less loss.

options.py    what may be asked for
bases.py      the table of kinds of bases: what each needs, which formats it suits, which blocks have one
pca.py        directions by how much of the stream lies in them
learnt.py     those, turned on by the model's own output while channels are skipped
check.py      whether the model in a basis is the model
run.py        the model, one block at a time

What becomes of the tensors is in `models.checkpoint.rotated`; what was done, in a record beside the rotated checkpoint
(`models.records.rotated`).
"""
