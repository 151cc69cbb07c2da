"""What a neuron GGUF holds in place of the sites `mlp_in` and `mlp_mid`, and of which models it can: for the writer and
the reader."""

from sparsepack.errors import PackingError
from sparsepack.formats.codecs.neurons import record_bytes
from sparsepack.formats.mlp_kinds import MLP_GATE, MLP_RECORDS
from sparsepack.models.architecture import Architecture

GATE, RECORDS = f"{MLP_GATE}.weight", f"{MLP_RECORDS}.weight"
FREQUENCY, ORDER = "mlp_frequency", "mlp_order"
GATE_ROWS = "Q4_K"
"""The type of gates that are stored by rows; of others it is `codecs.matrices.ZIGZAG`."""

EXACT_ZEROS = ("relu",)
"""Activations that make most of their outputs exactly zero, so that leaving these out changes nothing."""


def check_neurons(architecture: Architecture) -> None:
    """Raise `PackingError` unless a model's MLPs can be stored by neurons: some are inactive, and records fit."""
    if architecture.activation not in EXACT_ZEROS:
        raise PackingError(
            f"activation {architecture.activation!r}: its neurons are never exactly inactive, so leaving any out "
            f"would change the model; expected {' or '.join(EXACT_ZEROS)}; use zigzag-q4_k, which skips by thresholds"
        )
    record_bytes(architecture.hidden)
