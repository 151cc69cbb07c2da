"""What benchmarks share: timing and checks, peers, shapes and models of random weights, evaluation windows."""
