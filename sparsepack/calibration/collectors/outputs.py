"""Products of what attention heads give with itself, before o: the sum over tokens and over the query heads that share
a KV head of y y^T. A basis of the values is found from them (`rotation.pca`).
"""

import torch
from torch import Tensor

from sparsepack.calibration.collectors.collector import Collector


def _count(outputs: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    of_heads = torch.unflatten(outputs.flatten(0, -2).float(), -1, (kv_heads, -1, head_dim))  # [N, kv_heads, group, D]
    each = of_heads.transpose(0, 1).flatten(1, 2)
    product = each.transpose(1, 2) @ each
    return ((product.cpu() if product.device.type == "mps" else product).double(),)


OUTPUTS = Collector("outputs", ("output_product",), torch.float64, (0, 0, 0), _count, signed=True, later=True)
"""The sums are float64 [kv_heads, D, D]."""
