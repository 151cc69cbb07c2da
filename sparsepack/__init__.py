"""sparsepack: find where a language model is sparse, pack it so that hardware profits, prove it is the same model."""

__version__ = "0.1.0"
