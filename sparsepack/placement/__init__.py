"""Which neurons of the MLP live where: placements, the policies that change them, and what knows the future."""
