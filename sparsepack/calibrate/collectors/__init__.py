"""What the one pass over text collects."""
