"""Measure how fast an artifact decodes, and how near that is to what the memory allows."""
