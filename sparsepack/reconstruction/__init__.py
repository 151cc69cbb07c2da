"""Layer-wise reconstruction: a matrix changes so that its outputs, on inputs that were seen, stay what they were.

inputs.py        what is known of the inputs of a matrix, and the inverse of their products
block_inputs.py  which inputs a block's matrices have, those of experts too
feedback.py      column by column, each error put right by the columns behind it: the loop of SparseGPT and GPTQ
"""
