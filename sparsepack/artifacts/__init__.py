"""What a packed model is on disk: the table of formats, manifest, inspect, verify, and the containers."""
