"""A slid layer in vLLM: its parameters, what is prepared of them, and the product."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from sparsepack.errors import ArtifactError
from sparsepack.formats.linear_folder import SCALE
from sparsepack.formats.orders.slide import Slide, ValueType
from sparsepack.formats.slide import POSITIONS
from sparsepack.runtime.reference.products import Sparse24Matrix
from sparsepack.runtime.sparse24_operator import prepare, sparse24_linear

_WEIGHT = "weight"


@register_weight_loader_v2_supported_method
class Sparse24LinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Loads, prepares and multiplies the weights of a layer, of which each rank has a part.

    how    -- how the weights were slid
    values -- the type of their values
    tokens -- a product has at most so many

    The layer keeps what was loaded as it is, so that vLLM can load it again. What is prepared of it are parameters,
    too: vLLM moves those to where captured graphs expect them.
    """

    def __init__(self, how: Slide, values: ValueType, tokens: int) -> None:
        self.how, self.values, self.tokens = how, values, tokens

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Parameters as `formats.slide.slid_tensors`, with this rank's rows and columns, holding what no folder
        holds until they are loaded. Raises `ArtifactError` where ranks cannot share out the columns."""
        rows, columns, load = sum(output_partition_sizes), input_size_per_partition, attributes["weight_loader"]
        stored = self.how.stored(columns)
        # A rank's columns are whole groups, and their positions whole bytes.
        if columns != input_size and (self.how.pattern.tail(columns) or stored % 4):
            ranks, of = input_size // columns, self.how.pattern.of
            wanted = of if self.how.slots % 4 == 0 else 2 * of
            raise ArtifactError(
                f"{layer.prefix}: {input_size} inputs cannot be shared out to {ranks} ranks with {self.how.pattern}: "
                f"{columns} for each, expected a multiple of {wanted}; take another --tensor-parallel-size"
            )

        def matrix(width: int, dtype: torch.dtype) -> Any:
            data = _unloaded(rows, width, dtype=dtype)
            return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)

        layer.register_parameter(_WEIGHT, matrix(stored, self.values.dtype))
        layer.register_parameter(_WEIGHT + POSITIONS, matrix(-(-stored // 4), torch.uint8))
        if self.values.scaled:
            data = _unloaded(rows, dtype=torch.float32)
            scale = ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=load)
            layer.register_parameter(_WEIGHT + SCALE, scale)
        layer.stored_columns, layer.weight_dtype = columns, params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the products, once the weights are where they will be used. Raises `ArtifactError` for what was not
        loaded, and as `sparse24_operator.prepare`."""
        matrix = self._matrix(layer)
        for name, tensor in (("", matrix.values), (POSITIONS, matrix.positions), (SCALE, matrix.scale)):
            if tensor is not None and _is_unloaded(tensor):
                raise ArtifactError(
                    f"{layer.prefix}: {_WEIGHT + name} is missing or damaged in the folder; pack the model again"
                )
        prepared = prepare(matrix, layer.weight_dtype, self.tokens)
        for name, tensor in zip(_names(len(prepared)), prepared, strict=True):
            there = getattr(layer, name, None)
            if there is None:
                layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
            else:  # captured graphs read it there
                there.data.copy_(tensor)
        layer.prepared_weights = len(prepared)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, columns of this rank] -> [tokens, rows of this rank]."""
        prepared = [getattr(layer, name) for name in _names(layer.prepared_weights)]
        return sparse24_linear(x, self._matrix(layer), bias, prepared)

    def _matrix(self, layer: Any) -> Sparse24Matrix:
        scale = getattr(layer, _WEIGHT + SCALE, None)
        return Sparse24Matrix(layer.weight, getattr(layer, _WEIGHT + POSITIONS), scale, self.how, layer.stored_columns)


def _names(prepared: int) -> list[str]:
    return [f"{_WEIGHT}_prepared_{number}" for number in range(prepared)]


_NEVER_STORED = {torch.uint8: 0xFF, torch.int8: 0x80, torch.float8_e4m3fn: 0xFF}
"""No folder holds these bytes: positions ascend, integers are symmetric, no number is NaN, of larger types neither."""


def _unloaded(*shape: int, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(*shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(_NEVER_STORED.get(dtype, 0xFF))
    return tensor


def _is_unloaded(tensor: Tensor) -> bool:
    """Whether a value is there that no folder holds."""
    never = _NEVER_STORED.get(tensor.dtype)
    return bool((tensor.isnan() if never is None else tensor.view(torch.uint8) == never).any())
