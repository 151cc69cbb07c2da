"""What is known of a model beside its weights: rules of sites, pruning, sparse attention, counts of neurons."""
