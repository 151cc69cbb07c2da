"""The reference as a backend: on every device that torch has; see `runtime.decoder.BackendModule`."""

import torch

from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.kv_cache import AttentionShape
from sparsepack.runtime.options import EngineOptions
from sparsepack.runtime.reference import products
from sparsepack.runtime.reference.attention import DenseKvCache
from sparsepack.runtime.reference.double_sparsity import DoubleSparsityKvCache


def new_cache(shape: AttentionShape, type: str | None = None, device: torch.device | str = "cpu") -> DenseKvCache:
    """An empty cache, sparse where the shape has a policy: of float32, or to compare with another backend's, of "f16"
    or "bf16"."""
    return (DenseKvCache if shape.policy is None else DoubleSparsityKvCache)(shape, type or "f32", device)


class ReferenceOperations:
    """The oracle's functions, as decoders that chain them take them (`runtime/chained/layer.py`)."""

    load_zigzag = staticmethod(products.load_zigzag)
    load_rows = staticmethod(products.load_rows)
    collect = staticmethod(products.collect)
    zigzag_gemv = staticmethod(products.zigzag_gemv)
    zigzag_matmul = staticmethod(products.zigzag_matmul)
    planes_matmul = staticmethod(products.planes_matmul)
    matmul = staticmethod(products.matmul)
    load_neurons = staticmethod(products.load_neurons)
    neuron_ffn = staticmethod(products.neuron_ffn)
    neuron_matmul = staticmethod(products.neuron_matmul)
    new_cache = staticmethod(new_cache)


operations = ReferenceOperations()


def usable(device: torch.device) -> None:
    """Raise `UserError` for a device that torch does not find."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0]
        raise UserError(
            f"device {device}: torch finds no {device.type.upper()} device of that number on this machine ({reason}); "
            "use cpu"
        ) from error


def decoder(
    packed: PackedModel,
    device: torch.device,
    context: int,
    cache_type: str,
    options: EngineOptions,
) -> OperationsDecoder:
    usable(device)
    return OperationsDecoder(
        packed, operations, device, context, options.threads, cache_type, sequences=options.sequences or 1
    )


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)
