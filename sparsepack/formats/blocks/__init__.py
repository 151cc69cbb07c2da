"""Block types: the bytes of some weights that are quantised together, how they are encoded and decoded."""
