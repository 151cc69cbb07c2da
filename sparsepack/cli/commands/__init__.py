"""A file for each command: its arguments, its options, and the function that it calls."""
