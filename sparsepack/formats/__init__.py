"""What a packed model is on disk: the table of formats, blocks and orders, containers, and a file for each format."""
