"""Generated text for people, and conversations with them."""
