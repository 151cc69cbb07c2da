"""The folder of safetensors as a container, with a hash for every byte."""
