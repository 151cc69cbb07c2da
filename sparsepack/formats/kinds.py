"""How a matrix is stored, and how an MLP is: what the table of formats and what reads and writes them speak of."""

from dataclasses import dataclass, replace

from sparsepack.models.family import MLP_SITES


@dataclass(frozen=True)
class MatrixFormat:
    """How a matrix is stored: blocks in an order.

    block -- a row of `blocks.table.BLOCKS`, by name
    order -- which weights a block holds: of a row each ("rows"), 256 rows of a column ("zigzag") or 64 ("planes"),
             both of a neuron ("neuron"), the values of sliding windows ("slide"); all but the first are modules of
             `orders`
    """

    block: str
    order: str = "rows"

    def __str__(self) -> str:
        return self.block if self.order == "rows" else f"{self.order}-{self.block.lower()}"


MLP_GATE, MLP_RECORDS = "mlp_gate", "mlp_records"
"""What stands in place of the sites mlp_in and mlp_mid where an MLP is stored by neurons."""

GATE_ORDERS = ("zigzag", "rows")
"""The orders in which gates of MLPs by neurons are stored; by rows, the gate of one neuron can be read alone."""


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
PLAIN_NEURONS = replace(NEURONS, name="neurons without a gate")
"""The rows of up take the gate's place, and a record has no more than the column of down."""
