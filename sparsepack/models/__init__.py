"""What a checkpoint is: families as data, sites, and weights read one decoder block at a time."""
