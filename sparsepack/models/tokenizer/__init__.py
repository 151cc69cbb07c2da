"""A model's tokenizer, the conversations that it renders, and the tokens and windows of a text."""
