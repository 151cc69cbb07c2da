"""Measures of how good a model is, dense or sparse: lm-eval tasks, perplexity, divergence; each figure with its
protocol."""
