"""The library of our operators of torch, `torch.ops.sparsepack`, and gradients that none of them has.

By `torch.library.custom_op` every call would take longer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsepack.errors import UserError

_Library: Any = torch.library.Library
LIBRARY = _Library("sparsepack", "DEF")


def define(
    schema: str, run: Callable[..., Tensor], shape_alone: Callable[..., Tensor], on_cuda: Callable[..., Tensor] | None
) -> None:
    """Define an operator, whose first argument is the inputs x [..., columns] of a product with stored weights.

    run     -- on CPUs, and wherever it has nothing of its own
    shape_alone -- its fake
    on_cuda -- on NVIDIA's GPUs; None: as elsewhere

    Asking for the gradient of x is a `UserError`.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    if on_cuda is not None:
        LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"sparsepack::{name}", shape_alone, lib=LIBRARY)
    torch.library.register_autograd(f"sparsepack::{name}", _gradient, setup_context=_keep_sizes, lib=LIBRARY)


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *rest = inputs
    ctx.columns, ctx.others = x.shape[-1], [len(of) if isinstance(of, list | tuple) else None for of in rest]


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Asks for the gradient of x alone."""
    # An operation, since compilers trace the gradients of models that will never ask for them.
    of_x = torch.ops.sparsepack.no_gradient(gradient, ctx.columns)
    return of_x, *(None if count is None else [None] * count for count in ctx.others)


def _refuse(gradient: Tensor, columns: int) -> Tensor:
    raise UserError("packed weights have no gradients; train the model before it is packed (sparsepack distil)")


LIBRARY.define("no_gradient(Tensor gradient, int columns) -> Tensor")
LIBRARY.impl("no_gradient", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake(
    "sparsepack::no_gradient",
    lambda gradient, columns: gradient.new_empty(*gradient.shape[:-1], columns),
    lib=LIBRARY,
)
