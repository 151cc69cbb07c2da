"""What the tests of decoders with sparse attention share: models, the reference's decoder, and how near it is met."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from packed_models import random_model
from torch import Tensor

from sparsepack.formats.packed import PackedModel
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.runtime.chained.decoder import OperationsDecoder
from sparsepack.runtime.cuda.driver.kernel_set import KERNELS, Kernels
from sparsepack.runtime.reference.backend import operations as reference_operations

CONTEXT = 64
IDS = torch.randint(40, (CONTEXT,), generator=torch.Generator().manual_seed(4))


def policy_from(tokens: int) -> TokenPolicy:
    """A quarter of the tokens, in texts of so many or more."""
    return TokenPolicy(Fraction(1, 4), sinks=1, recent=3, min_context=tokens)


def sparse_model(variant: str, policy: TokenPolicy, dense_layers: int = 1, **changes: Any) -> PackedModel:
    """A random model that selects tokens by four channels of each head, in all but its first layers."""
    packed = random_model(variant, **changes)
    a = packed.architecture
    random = torch.Generator().manual_seed(3)
    heavy = [
        torch.stack([torch.randperm(a.head_dim, generator=random)[:4].sort().values for _ in range(a.kv_heads)])
        for _ in range(a.layers)
    ]
    channels = (*(None,) * dense_layers, *heavy[dense_layers:])
    return replace(packed, attention=SparseAttention(policy, channels))


def oracle(packed: PackedModel) -> OperationsDecoder:
    return OperationsDecoder(packed, reference_operations, torch.device("cpu"), CONTEXT, None)


def device_of(kernels: Kernels) -> torch.device:
    return torch.device("cuda" if kernels is KERNELS else "cpu")


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found.cpu() - expected).abs().max() <= 2e-3 * expected.abs().max()
