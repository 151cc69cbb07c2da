"""The importance of each channel of an attention head, by which Double Sparsity chooses its heavy channels (4.1)."""

from dataclasses import dataclass

import torch

from sparsepack.calibration.collectors import Statistics
from sparsepack.calibration.collectors.products import of_groups
from sparsepack.calibration.folder import Calibration


@dataclass(frozen=True)
class Importance:
    """The importance of every channel of every KV head of a layer: float64 [kv_heads, D] each, of any scale.

    q and k are those after q/k norms and rotary embedding, their channels in the model's own order. The first positions
    of a window (attention sinks) are left out, as queries and as keys: Double Sparsity always reads the sinks' keys.

    query   -- sum over positions of |q_c|, the mean over the query heads that share the KV head
    key     -- sum over positions of |k_c|
    product -- sum over pairs of a query and a key that it sees of |q_c k_c|, the mean over these query heads
    """

    query: torch.Tensor
    key: torch.Tensor
    product: torch.Tensor


def importance(calibration: Calibration) -> tuple[Importance, ...]:
    """The importance of channels in every layer."""
    return tuple(_of_layer(layer) for layer in calibration.layers)


def _of_layer(statistics: Statistics) -> Importance:
    query, key, product = (statistics[f"attention.{name}_abs"] for name in ("query", "key", "product"))
    return Importance(of_groups(query, len(key)), key, product)
