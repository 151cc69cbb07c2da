"""What stock llama.cpp must be told of a model: its keys, its vocabulary, its names of pre-tokenizers."""
