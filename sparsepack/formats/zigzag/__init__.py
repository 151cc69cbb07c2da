"""The zigzag GGUF: its layout, its plan, its reader."""
