"""NVIDIA's driver: compiling, loading and launching kernels, graphs, memory that host and device share."""
