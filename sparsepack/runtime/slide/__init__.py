"""Slid folders in stock transformers: Linears that hold slid weights, and what puts them into a model that is loaded.

reference.py     products with slid weights in plain torch: the oracle
linear.py        the Linear
quantizer.py     what transformers calls for `quant_method: sparsepack`
registration.py  tells transformers of it, once somebody imports transformers
"""
