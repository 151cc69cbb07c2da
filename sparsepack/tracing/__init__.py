"""Traces: who was active in the MLPs of a model, token by token, and how even or uneven that is."""
