"""The operations and the decoder on NVIDIA GPUs: CUDA C++ in `kernels/`, compiled at first use."""
