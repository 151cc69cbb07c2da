"""Models by neurons on two devices: the neurons with places on one, all others where the host keeps them."""
