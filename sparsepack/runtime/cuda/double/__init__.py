"""Double Sparsity on the GPU: the label cache, and attention of a decoding step to the tokens that it ranks best."""
