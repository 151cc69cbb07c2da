"""What lm-eval's command line loads: a model named sparsepack."""
