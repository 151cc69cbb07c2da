"""The oracle: every operation in plain torch, written to be read, and the backend that is made of them."""
