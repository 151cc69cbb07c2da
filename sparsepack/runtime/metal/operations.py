"""The operations of `runtime/chained/layer.py` by Metal kernels. A decoded token takes none of these but the
kernels that they launch, one behind the other (`step.py`)."""

import torch
from torch import Tensor

from sparsepack.formats.orders.zigzag import BAND_ROWS
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.kv_cache import AttentionShape
from sparsepack.runtime.metal import products
from sparsepack.runtime.metal.kv_cache import MetalKvCache
from sparsepack.runtime.metal.products import LEVELS, SEGMENT, ActiveColumns, MetalZigzag, Sums
from sparsepack.runtime.reference import products as reference


def collect(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """List the active columns of an input vector; see `reference.collect`."""
    x, columns = x.float().contiguous(), len(x)
    found = products.new_active_columns(columns, x.device)
    products.collect(x, found, threshold=threshold.float().reshape(-1).contiguous())()
    counts = found.counts[: len(found.counts) // 2]
    inside = torch.arange(SEGMENT, device=x.device) < counts[:, None]
    places = torch.argsort(inside.reshape(-1).byte(), descending=True, stable=True)[:columns]
    return found.indices[places], counts.sum(dtype=torch.int32)


def zigzag_gemv(matrix: MetalZigzag, x: Tensor, indices: Tensor, count: Tensor) -> Tensor:
    """y = W[:, active] x[active]; see `reference.zigzag_gemv`. The same bits every run."""
    device, config = x.device, matrix.config
    parts = torch.empty(config.splits, matrix.bands * BAND_ROWS, device=device)
    active = torch.zeros(1, dtype=torch.int32, device=device)
    products.zigzag_gemv(matrix, _listed(x, indices, count), parts, active)()
    y = products.new_active_columns(matrix.rows, device)
    products.collect(torch.zeros(matrix.rows, device=device), y, added=Sums(parts))()
    return y.values[: matrix.rows]


def _listed(x: Tensor, indices: Tensor, count: Tensor) -> ActiveColumns:
    """Columns in ascending order, as `products.collect` leaves them, by operations that no host waits for."""
    found, columns = products.new_active_columns(len(x), x.device), len(x)
    number = torch.arange(columns, device=x.device)
    active = torch.where(number < count, indices[:columns].long(), columns)  # others: none of the columns
    segments = len(found.counts) // 2
    ends = torch.arange(SEGMENT, SEGMENT * (segments + 1), SEGMENT, device=x.device).clamp(max=columns)
    before = (active < ends[:, None]).sum(1)
    begin = torch.nn.functional.pad(before[:-1], (1, 0))
    listed = before - begin
    found.counts.copy_(torch.cat([listed, LEVELS * listed]))
    segment = (active // SEGMENT).clamp(max=len(begin) - 1)
    place = torch.where(number < count, segment * SEGMENT + number - begin[segment], -1)
    # What is no column goes behind the end, and is cut off.
    padded = torch.cat([found.indices, found.indices[:1]])
    found.indices.copy_(padded.index_copy(0, place % len(padded), active.int())[:-1])
    found.values.copy_(x[found.indices.clamp(0, columns - 1).long()])
    return found


class MetalOperations:
    """The functions on neurons are the reference's, which run on any device: no kernel does that yet."""

    load_zigzag = staticmethod(products.load_zigzag)
    load_rows = staticmethod(products.load_rows)
    collect = staticmethod(collect)
    zigzag_gemv = staticmethod(zigzag_gemv)
    zigzag_matmul = staticmethod(products.zigzag_matmul)
    planes_matmul = staticmethod(products.planes_matmul)
    matmul = staticmethod(products.matmul)
    load_neurons = staticmethod(reference.load_neurons)
    neuron_ffn = staticmethod(reference.neuron_ffn)
    neuron_matmul = staticmethod(reference.neuron_matmul)

    @staticmethod
    def new_cache(shape: AttentionShape, type: str | None = None, device: torch.device | str = "mps") -> MetalKvCache:
        """An empty cache of float16 keys and values. Raises `UserError` for another type, and for heads that the
        kernels do not know."""
        find_backend("metal").choose_cache_type(type)
        return MetalKvCache(shape, torch.device(device))


operations = MetalOperations()
