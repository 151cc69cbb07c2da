"""A decoder out of the operations that a backend offers, chained by torch; on any device."""
