"""Products of what attention heads give with itself, before o: the sum over tokens and over the query heads that share
a KV head of y y^T. A basis of the values is found from them (`rotation.pca`).
"""

import torch
from torch import Tensor

from sparsepack.calibration.collectors import wide
from sparsepack.calibration.collectors.collector import Collector


def _count(outputs: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
    windows = torch.unflatten(outputs, -1, (-1, head_dim))  # [B, S, heads, D]
    each = [wide.product(of.permute(1, 2, 0), of.transpose(0, 1)) for of in windows]  # [heads, D, D]
    product = torch.unflatten(torch.stack(each), 1, (kv_heads, -1)).sum((0, 2))
    return ((product.cpu() if product.device.type == "mps" else product).double(),)


OUTPUTS = Collector("outputs", ("output_product",), torch.float64, (0, 0, 0), _count, signed=True, later=True)
"""The sums are float64 [kv_heads, D, D]."""
