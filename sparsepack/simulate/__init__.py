"""Play a trace under policies and numbers of places: hits, moves and modelled speeds."""
