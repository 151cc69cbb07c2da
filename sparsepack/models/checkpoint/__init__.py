"""What a trained model is on disk: its tensors, its configuration, the hash of its weights."""
