"""Apple GPUs through torch's MPS device and kernels in the Metal Shading Language."""
