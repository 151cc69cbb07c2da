"""Which neurons of the MLP live where: traces of who is active, placements, policies that move neurons, a simulator."""
