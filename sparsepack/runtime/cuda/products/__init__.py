"""Products of stored matrices on an NVIDIA GPU, and what is measured to make them fast."""
