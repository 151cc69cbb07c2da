"""A packed model on an NVIDIA GPU: its step as a graph, its prefill, its sampling."""
