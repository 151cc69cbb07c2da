"""Products with sparse24 weights on NVIDIA GPUs.

product.py     which kernel makes them, the weights as it takes them, inputs and outputs: begin here
hopper.py      our kernel for Hopper
cusparselt.py  NVIDIA's library for others, and which of its algorithms is the fastest
"""
