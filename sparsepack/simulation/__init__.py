"""Play a trace under policies and numbers of slots: hits, moves and modelled speeds."""
