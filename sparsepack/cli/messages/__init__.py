"""What the command line says beside its results: errors, hints, progress, and the streams that take all of it."""
