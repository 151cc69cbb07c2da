"""Writing a text: which token comes next, what it reads like, and when it is over."""
