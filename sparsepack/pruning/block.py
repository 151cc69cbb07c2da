"""One block: its inputs put into a better order where that is asked for, then each matrix pruned."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sparsepack.errors import PruningError, SingularError
from sparsepack.files.tensors import all_finite
from sparsepack.models.checkpoint.checkpoint import Checkpoint
from sparsepack.models.precision import brought
from sparsepack.models.records.pattern import Pattern
from sparsepack.models.records.pruned import PrunedMatrix
from sparsepack.models.sites import site_name
from sparsepack.pruning.methods import METHODS, Method
from sparsepack.pruning.options import PruneOptions
from sparsepack.pruning.permute import better_order, of_query_heads, permuted_block
from sparsepack.reconstruction.block_inputs import inputs_name
from sparsepack.reconstruction.inputs import Inputs, root_of_share


def prune_block(
    checkpoint: Checkpoint,
    layer: int,
    patterns: Mapping[str, Pattern],
    inputs: Mapping[str, Inputs],
    options: PruneOptions,
    device: torch.device,
) -> tuple[dict[str, Tensor], list[PrunedMatrix]]:
    """The tensors of a block that change, by their names within it, in their stored type on the CPU; and what was done.

    patterns -- of the sites that are pruned
    inputs   -- of these sites' matrices, by the names that `inputs_name` gives; none where the method needs none
    """
    family, method = checkpoint.family, METHODS[options.method]
    prefix = f"{family.block(layer)}."
    inputs = dict(inputs)

    def tensor(name: str) -> Tensor:
        return checkpoint.tensor(prefix + name)

    def known(name: str, columns: int = 0) -> Inputs:
        columns = columns or checkpoint.stacked_shape(name, layer)[1]
        return inputs.get(name) or Inputs(torch.ones(columns, device=device))

    changed: dict[str, Tensor] = {}
    orders: dict[str, Tensor] = {}
    if options.permute:
        orders = _orders(checkpoint, layer, patterns, known, options, device)
        names = [name.removeprefix(prefix) for name in checkpoint.source.shapes if name.startswith(prefix)]
        block = {name: tensor(name) for name in names}
        neurons, channels = orders.get("mlp_mid"), orders.get("attn_out")
        moved = permuted_block(block, family, neurons, channels, checkpoint.config.num_attention_heads)
        changed = {name: value.contiguous() for name, value in moved.items() if value is not block[name]}
        if neurons is not None:
            inputs["mlp_mid"] = known("mlp_mid").permuted(neurons.to(device))
        if channels is not None:
            order = of_query_heads(channels, checkpoint.config.num_attention_heads)
            inputs["attn_out"] = known("attn_out").permuted(order.to(device))
    rows = []
    for site, pattern in patterns.items():
        for projection in family.projections[site]:
            name = family.weight(projection)
            stored = changed.get(name, tensor(name))
            of_each = [known(inputs_name(family, site, projection, n), stored.shape[-1]) for n in range(_count(stored))]
            try:
                pruned, stay, error = _pruned(stored, of_each, method, pattern, device)
            except SingularError as found:
                raise PruningError(
                    f"{prefix}{projection}: {found}; give a larger --damping or more --windows"
                ) from found
            if stay is None:
                raise PruningError(f"{prefix}{projection}: weights that are not finite; they cannot be pruned")
            rows.append(
                PrunedMatrix(
                    matrix=f"{prefix}{projection}",
                    site=site_name(layer, site),
                    keep=pattern.keep,
                    of=pattern.of,
                    tail=pattern.tail(stored.shape[-1]),
                    density=stay / pruned.numel(),
                    error=error,
                    permuted=site in orders,
                )
            )
            changed[name] = pruned
    return changed, rows


def _count(stored: Tensor) -> int:
    """How many matrices a projection is: one, or one of each expert."""
    return len(stored) if stored.dim() == 3 else 1


def _pruned(
    stored: Tensor, inputs: Sequence[Inputs], method: Method, pattern: Pattern, device: torch.device
) -> tuple[Tensor, int | None, float]:
    """A matrix or those of all experts, pruned, in their stored type; how many of their weights are not zero, None
    where some are not finite; and their relative error.

    inputs -- what enters the matrix, or each of them
    """
    pruned, stay, finite = torch.empty(stored.shape, dtype=stored.dtype), 0, True
    size = difference = 0.0
    each = (len(inputs), -1, stored.shape[-1])
    for matrix, known, into in zip(stored.reshape(each), inputs, pruned.view(each), strict=True):
        weight = brought(matrix, device, torch.float32)
        made = method.prune(weight, known, pattern).to(stored.dtype)
        into.copy_(made)
        stay, finite = stay + int(made.count_nonzero()), finite and all_finite(made)
        size += known.output_squares(weight)
        difference += known.output_squares(weight - made.float())
    return pruned, stay if finite else None, root_of_share(difference, size)


def _orders(
    checkpoint: Checkpoint,
    layer: int,
    patterns: Mapping[str, Pattern],
    known: Callable[[str], Inputs],
    options: PruneOptions,
    device: torch.device,
) -> dict[str, Tensor]:
    """Better orders, on the CPU: of the neurons by "mlp_mid", of the channels of each value head by "attn_out". Sites
    where none was found are left out."""
    orders = {}
    values_of = METHODS[options.method].values
    for site, pattern in patterns.items():
        if site not in ("mlp_mid", "attn_out"):
            continue
        (weight,) = checkpoint.projections(layer, site)
        values = values_of(brought(weight, device, torch.float32), known(site))
        if site == "mlp_mid":
            if (order := better_order(values, pattern)) is not None:
                orders[site] = order.cpu()
            continue
        config = checkpoint.config
        heads, kv_heads = config.num_attention_heads, checkpoint.family.setting(config, "num_key_value_heads")
        width = values.shape[1] // heads
        if width % pattern.of:
            continue  # groups would lie across heads, each of which has an order of its own
        # A channel of a value head is a column for each query head that shares it.
        of_head = values.view(-1, kv_heads, heads // kv_heads, width).permute(1, 0, 2, 3).flatten(1, 2)
        found = [better_order(rows, pattern) for rows in of_head]
        if any(order is not None for order in found):
            same = torch.arange(width, device=device)
            orders[site] = torch.stack([same if order is None else order for order in found]).cpu()
    return orders
