"""The plain GGUF, which stock llama.cpp loads."""
