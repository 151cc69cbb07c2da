"""Statistics of a model's hidden vectors, and the thresholds derived from them."""
