"""Double Sparsity: attention of decoded positions to the tokens that their labels rank best."""
