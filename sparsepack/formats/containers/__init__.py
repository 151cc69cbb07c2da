"""Files in which the tensors of an artifact lie: a GGUF, or a folder of safetensors."""
