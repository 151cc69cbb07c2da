"""Structured weight sparsity: which weights of every group stay, and what the others leave to them.

options.py    what may be asked for
methods.py    the table of methods: magnitude, Wanda, SparseGPT
permute.py    orders of neurons and value channels in which less is lost
run.py        the model, one block at a time

The pruned checkpoint is written by `models.checkpoint.writer`; what was done to it stands in a record beside it
(`models.records.pruned`).
"""
