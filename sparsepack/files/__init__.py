"""The bottom layer: outputs that appear whole or not at all, hashes, GGUF headers, text."""
