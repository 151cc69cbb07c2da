"""Pure functions between weights and their stored bytes."""
