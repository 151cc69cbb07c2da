"""The GGUF container, and the formats that live in it."""
