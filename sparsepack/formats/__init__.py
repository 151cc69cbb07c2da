"""What a packed model looks like on disk: codecs as pure functions on tensors, containers, manifests."""
