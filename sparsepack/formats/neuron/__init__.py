"""The neuron GGUF: its layout, its plan, its reader."""
