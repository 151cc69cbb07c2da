"""What the quickstart needs and every installation has: a tiny trained model and its texts."""

from pathlib import Path

TINY_MODEL = Path(__file__).parent / "tiny"
"""A Llama of 2 M parameters trained by tools/train_tiny_model.py; `shipped:tiny` on the command line."""
