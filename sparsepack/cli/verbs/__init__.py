"""A file for each verb: its arguments, its options, and the function that it calls."""
