"""Models by neurons on two devices: the neurons with slots on one, all others where the host keeps them."""
