"""What a packed model is on disk: the table of formats, a folder for each, the containers that they share, codecs."""
