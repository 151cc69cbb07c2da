"""The names of what a neuron GGUF holds in place of the sites `mlp_in` and `mlp_mid`, for the writer and the reader."""

GATE, RECORDS = "mlp_gate.weight", "mlp_records.weight"
FREQUENCY, ORDER = "mlp_frequency", "mlp_order"

SITES_BESIDE = ("attn_in", "attn_out")
"""Stored as in a zigzag GGUF."""
