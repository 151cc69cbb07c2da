"""Products with slid weights on NVIDIA GPUs.

product.py     which kernel makes them, and the weights as it takes them: begin here
inputs.py      inputs quantised and lifted
hopper.py      our kernel for Hopper
cusparselt.py  NVIDIA's library for others; algorithms.py keeps which of its algorithms is the fastest
outputs.py     the scales that the library leaves out
"""
