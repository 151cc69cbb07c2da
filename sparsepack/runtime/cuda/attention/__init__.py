"""Attention on an NVIDIA GPU with its caches: dense, sparse, offloaded."""
