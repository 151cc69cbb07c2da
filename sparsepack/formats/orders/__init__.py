"""Orders: which weights of a matrix a block holds, in what sequence, and what a reader may leave out."""
