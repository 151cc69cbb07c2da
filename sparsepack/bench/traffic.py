"""The size of a packed model, and how much of the model each decoded token reads."""

from collections.abc import Mapping

from torch import Tensor

from sparsepack.formats.packed import PackedModel

Activity = Mapping[tuple[int, str], float]
"""The share of active columns, or of active records, stands under (layer, site), as `Engine.activity` returns it; a
site that is not named is wholly active."""


def parameters(packed: PackedModel) -> int:
    """The model's parameters: logical weights, norms and biases; a tied output matrix counts once."""
    matrices = [packed.embedding] + ([] if packed.architecture.tied else [packed.output])
    count = packed.output_norm.numel() + sum(matrix.weights for matrix in [*matrices, *packed.bases.values()])
    for layer in packed.layers:
        count += sum(matrix.weights for matrix in layer.matrices.values())
        count += sum(tensor.numel() for tensor in layer.mlp.always)
        count += sum(norm.numel() for norm in layer.norms.values())
        count += sum(site.bias.numel() for site in layer.sites.values() if site.bias is not None)
    return count


def stored_bytes(packed: PackedModel) -> int:
    """Bytes of all stored tensors, padding rows included, metadata not."""
    embedding = 0 if packed.architecture.tied else packed.embedding.blocks.nbytes
    return (
        embedding
        + _always_read(packed)
        + sum(matrix.nbytes for layer in packed.layers for matrix in layer.matrices.values())
    )


def bytes_per_token(packed: PackedModel, activity: Activity, pads_tails: bool = False) -> float:
    """Stored bytes that decoding one token needs: active columns and records, of experts those that it has, the output
    matrix, one row of the embedding, changes of basis, norms, routers, biases, scales of rows and rules. The KV cache,
    which grows with the text, is left out.

    pads_tails -- as `Backend.pads_tails`: tails count as whole bands
    """
    blocks = sum(
        (matrix.padded_nbytes if pads_tails else matrix.nbytes)
        * layer.reached[name]
        * activity.get((number, name), 1.0)
        for number, layer in enumerate(packed.layers)
        for name, matrix in layer.matrices.items()
    )
    row = packed.embedding.blocks.nbytes / packed.embedding.rows
    return blocks + row + _always_read(packed)


def _always_read(packed: PackedModel) -> int:
    tensors: list[Tensor | None] = [packed.output.blocks, packed.output_norm]
    tensors += [basis.blocks for basis in packed.bases.values()]
    for layer in packed.layers:
        tensors += [*layer.norms.values(), *layer.mlp.always]
        for site in layer.sites.values():
            tensors += [site.bias, site.matrix.row_scale]
            if site.rule is not None:
                tensors += [site.rule.limits, site.rule.offset]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
