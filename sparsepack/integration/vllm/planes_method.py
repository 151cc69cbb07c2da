"""A layer in planes in vLLM: its parameters, what is prepared of them, the product, and which tokens are decoded."""

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    PackedvLLMParameter,
    RowvLLMParameter,
)

from sparsepack.errors import ArtifactError, UserError
from sparsepack.formats.linear_folder import SCALE
from sparsepack.formats.orders.planes import PIECE_BYTES, PIECE_ROWS, pieces
from sparsepack.formats.planes import LEVELS, STEPS, THRESHOLD
from sparsepack.runtime.planes_operator import PlanesMatrix, decoded_rows, planes_linear, prepare

_WEIGHT = "weight"
_PREPARED = (f"{_WEIGHT}_prepared_0", f"{_WEIGHT}_prepared_1")
MOST_DECODED = 16
"""More tokens that are decoded together read all planes."""


@register_weight_loader_v2_supported_method
class PlanesLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Loads, prepares and multiplies the weights of a layer, of which each rank has a part.

    The layer keeps what was loaded as it is, so that vLLM can load it again. The tensors that are prepared of it are
    parameters, too, by which compiled graphs know them.
    """

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
        """Parameters as `formats.planes.planes_tensors`, with this rank's rows and columns, holding what no folder
        holds until they are loaded. Raises `ArtifactError` where ranks cannot share out the rows."""
        rows, columns, load = sum(output_partition_sizes), input_size_per_partition, attributes["weight_loader"]
        shared_out = rows != output_size or len(output_partition_sizes) > 1
        for part in output_partition_sizes if shared_out else ():
            if part % PIECE_ROWS:
                raise ArtifactError(
                    f"{layer.prefix}: {part} rows of {output_size} for each of {output_size // rows} ranks, expected a "
                    f"multiple of {PIECE_ROWS}; take another --tensor-parallel-size"
                )
        unloaded = torch.full((pieces(rows), columns, PIECE_BYTES), 0xFF, dtype=torch.uint8)
        packed = {"packed_factor": PIECE_ROWS, "packed_dim": 0, "input_dim": 1, "output_dim": 0}
        layer.register_parameter(_WEIGHT, PackedvLLMParameter(data=unloaded, weight_loader=load, **packed))
        scale = ChannelQuantScaleParameter(data=_unloaded(rows), output_dim=0, weight_loader=load)
        layer.register_parameter(_WEIGHT + SCALE, scale)
        # All parts of a fused layer bring the same ones.
        threshold = RowvLLMParameter(data=_unloaded(columns), input_dim=0, weight_loader=load)
        layer.register_parameter(_WEIGHT + THRESHOLD, threshold)
        steps = BasevLLMParameter(data=_unloaded(len(LEVELS)), weight_loader=load)
        layer.register_parameter(_WEIGHT + STEPS, steps)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the products, once the weights are where they will be used. Raises `ArtifactError` for what was not
        loaded, `UserError` on a GPU, for which there are no kernels."""
        matrix = _matrix(layer)
        if not matrix.pieces.is_cpu:
            raise UserError(
                f"{layer.prefix}: planes in vLLM run on CPUs alone so far; serve the zigzag-q6_p file by `sparsepack "
                "serve` on this GPU"
            )
        for name in (_WEIGHT + SCALE, _WEIGHT + THRESHOLD, _WEIGHT + STEPS):
            if getattr(layer, name).isnan().any():
                raise ArtifactError(f"{layer.prefix}: {name} is missing in the folder; pack the model again")
        if (matrix.pieces == 0xFF).all(-1).any():
            raise ArtifactError(f"{layer.prefix}: {_WEIGHT} is missing in the folder; pack the model again")
        decoded_rows(decoded_tokens)
        layer.prepared_planes = prepare(matrix)  # which the tensors need for as long as they are used
        for name, tensor in zip(_PREPARED, layer.prepared_planes.tensors, strict=False):
            there = getattr(layer, name, None)
            if there is None:
                layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
            else:  # compiled graphs read it there
                there.data.copy_(tensor)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [tokens, columns of this rank] -> [tokens, rows of this rank]."""
        prepared = [getattr(layer, name) for name in _PREPARED if hasattr(layer, name)]
        return planes_linear(x, _matrix(layer), bias, prepared, None)


def _matrix(layer: Any) -> PlanesMatrix:
    rest = (getattr(layer, _WEIGHT + part) for part in (SCALE, THRESHOLD, STEPS))
    return PlanesMatrix(layer.weight, *rest)


def _unloaded(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


_LAST: list[tuple[Any, int, Tensor]] = []
"""The answer for the last step, which is the same for all of its layers."""


def decoded_tokens(count: int) -> Tensor:
    """Which tokens of a step of vLLM are decoded, of `count` with padding: bool [count], by the metadata of attention.

    A sequence that has one token in a step and others before it decodes that token, as far as vLLM says: the last token
    of a prompt whose others were cached counts, too. Where vLLM says nothing, as before anything is served, or more
    than `MOST_DECODED` are decoded, none is.
    """
    metadata = _metadata()
    if _LAST and _LAST[0][0] is metadata and _LAST[0][1] == count:
        return _LAST[0][2]
    found = torch.zeros(count, dtype=torch.bool)
    starts, lengths = (getattr(metadata, name, None) for name in ("query_start_loc", "seq_lens"))
    if starts is not None and lengths is not None:
        queries = starts.diff()[: len(lengths)].cpu()
        decoding = (queries == 1) & (lengths[: len(queries)].cpu() > 1)
        if 0 < int(decoding.sum()) <= MOST_DECODED:
            of_tokens = decoding.repeat_interleave(queries)[:count]
            found[: len(of_tokens)] = of_tokens
            found[len(of_tokens) :] = bool(of_tokens.all())  # of padding nothing is used
    _LAST[:] = [(metadata, count, found)]
    return found


def _metadata() -> Any | None:
    """That of some layer's attention; None: there is none, or that of several batches at once."""
    found = get_forward_context().attn_metadata if is_forward_context_available() else None
    return next(iter(found.values()), None) if isinstance(found, dict) else None
