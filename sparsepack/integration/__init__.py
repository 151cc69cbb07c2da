"""The parts of sparsepack that other programs load."""
