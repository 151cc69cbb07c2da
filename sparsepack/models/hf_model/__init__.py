"""The Hugging Face transformers model: whole, or block by block, watched and changed at its sites."""
