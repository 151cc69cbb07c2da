"""The kinds of MLPs that formats store and backends run, a row each. The values themselves are in `formats.packed`."""

from dataclasses import dataclass

from sparsepack.models.family import MLP_SITES

MLP_GATE, MLP_RECORDS = "mlp_gate", "mlp_records"

GATE_ORDERS = ("zigzag", "rows")
"""The orders in which gates of MLPs by neurons are stored; by rows, the gate of one neuron can be read alone."""
"""What stands in place of the sites mlp_in and mlp_mid where an MLP is stored by neurons."""


@dataclass(frozen=True)
class MlpKind:
    """How an MLP is stored, and what of it a decoded token leaves out.

    name     -- for messages: a model "by neurons"
    counted  -- the names of its matrices, under which what a token reads is counted, in the order of `decoder.h`
    exact    -- those of `counted` whose inactive units are left out exactly, whatever the rules of the sites
    instead  -- for messages: what else the model could be packed as, a clause that begins with a comma
    by_count -- the units are stored in the order of how often a calibration or a trace saw each active
    """

    name: str
    counted: tuple[str, ...]
    exact: tuple[str, ...] = ()
    by_count: bool = False
    instead: str = ""


DENSE = MlpKind("sites", MLP_SITES)
EXPERTS = MlpKind("experts", MLP_SITES)
NEURONS = MlpKind(
    "neurons", (MLP_GATE, MLP_RECORDS), (MLP_RECORDS,), by_count=True, instead=", or pack the model as zigzag-q4_k"
)
