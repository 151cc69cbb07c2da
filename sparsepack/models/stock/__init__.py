"""The stock transformers model: built without weights, run block by block, watched by hooks."""
