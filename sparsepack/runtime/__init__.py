"""The operations that run packed models, their oracle, and the engine that chains them into a decoder."""
