"""Benchmarks: one module for each table of RESULTS.md; `python -m benchmarks` lists them."""
