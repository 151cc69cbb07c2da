"""The parts that transformers loads: slid Linears with their quantizer, and sparse attention."""
